"""Models and their training: results of each operation, order, failed and refused passes."""

import pytest

from skyrl.backends.backend import CreateModel, DeleteModel, ForwardBackward, OptimStep, Rejected
from skyrl.errors import RequestError
from skyrl.types import (
    ErrorResponse,
    ForwardBackwardOutput,
    GradientEffect,
    LoraConfig,
    ModelOutput,
    OptimStepOutput,
    SaveOutput,
)
from tests.conformance.operations import (
    ADAM,
    OTHER_TOKENS,
    SEVERAL_QUANTA,
    TOKENS,
    a_datum,
    a_load,
    a_pass,
    a_publish,
    a_save,
    a_snapshot,
    a_step,
    assert_same,
    differ,
    done,
    ends,
    failure,
    fresh,
    logprobs,
    run,
    state,
    step,
)

pytestmark = pytest.mark.gpu


def test_a_model_exists_from_its_creation_to_its_deletion(backend):
    assert not backend.has_model("short-lived")
    backend.create_model("short-lived", LoraConfig(rank=4, seed=0))
    assert backend.has_model("short-lived")
    backend.delete_model("short-lived")
    assert not backend.has_model("short-lived")


def test_creating_a_model_twice_is_refused_and_leaves_the_first_alone(backend, model):
    done(backend, a_pass(model), a_step(model))
    before = logprobs(backend, model)
    again = CreateModel(request_id=fresh(), model_id=model, lora_config=LoraConfig(rank=4, seed=8))
    assert model in failure(backend, again)
    assert_same(logprobs(backend, model), before)


def test_a_rank_above_the_limit_is_refused_with_the_limit(backend):
    if backend.info().max_lora_rank >= 64:
        backend.create_model("large", LoraConfig(rank=64))
        backend.delete_model("large")
        return
    with pytest.raises(RequestError, match=rf"rank=64.*max_lora_rank={backend.info().max_lora_rank}"):
        backend.create_model("large", LoraConfig(rank=64))


@pytest.mark.parametrize(
    "make",
    [a_pass, a_step, lambda model: a_snapshot(model, "nowhere"), lambda model: a_publish(model, "v", "nowhere")],
    ids=["forward_backward", "optim_step", "snapshot", "publish"],
)
def test_work_on_a_model_that_does_not_exist_is_refused_by_name(backend, make):
    assert "model_id=nobody is not loaded" in failure(backend, make("nobody"))


def test_info_tells_limits_and_the_name_of_the_base_model(backend):
    info = backend.info()
    assert info.base_model and info.vocab_size > 0 and info.max_context_length > 0 and info.max_lora_rank > 0


def test_each_operation_returns_its_kind_of_result(backend, model, tmp_path):
    results = done(
        backend,
        a_pass(model),
        a_step(model),
        a_save(model, tmp_path / "save"),
        a_load(model, tmp_path / "save"),
        a_publish(model, fresh("version"), tmp_path / "version"),
        DeleteModel(request_id=fresh(), model_id=model),
    )
    kinds = [ForwardBackwardOutput, OptimStepOutput, SaveOutput, ModelOutput, SaveOutput, ModelOutput]
    assert [type(result) for result in results] == kinds


def test_a_pass_returns_logprobs_and_losses_of_each_datum_and_their_sum(backend, model):
    (output,) = done(backend, a_pass(model, TOKENS, OTHER_TOKENS))
    assert isinstance(output, ForwardBackwardOutput)
    total = 0.0
    for datum, tokens in zip(output.loss_fn_outputs, (TOKENS, OTHER_TOKENS), strict=True):
        expected = -a_datum(tokens).loss_fn_inputs["weights"] * datum["logprobs"]
        assert_same(datum["elementwise_loss"], expected)
        total += float(expected.sum())
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)


def test_operations_of_a_model_take_effect_in_the_order_of_their_submission(backend, model):
    untrained, _, _, trained = done(
        backend, a_pass(model, forward_only=True), a_pass(model), a_step(model), a_pass(model, forward_only=True)
    )
    before, after = (output.loss_fn_outputs[0]["logprobs"] for output in (untrained, trained))
    assert differ(before, after)
    assert after.sum() > before.sum()


def test_gradients_of_several_requests_add_up_to_those_of_one(backend, new_model):
    whole, split = new_model(), new_model()
    done(backend, a_pass(whole, TOKENS, OTHER_TOKENS), a_step(whole))
    done(backend, a_pass(split, TOKENS), a_pass(split, OTHER_TOKENS), a_step(split))
    assert_same(logprobs(backend, split), logprobs(backend, whole))


def test_an_optimizer_step_clears_the_gradients(backend, model):
    done(backend, a_pass(model), a_step(model))
    (second,) = done(backend, a_step(model))
    assert isinstance(second, OptimStepOutput)
    assert second.metrics["skyrl.ai/grad_norm"] == 0.0


def test_forward_leaves_gradients_as_they_are(backend, new_model):
    plain, looked_at = new_model(), new_model()
    done(backend, a_pass(plain), a_step(plain))
    done(backend, a_pass(looked_at), a_pass(looked_at, OTHER_TOKENS, forward_only=True), a_step(looked_at))
    assert_same(logprobs(backend, looked_at), logprobs(backend, plain))


def test_a_failed_pass_fails_the_next_optimizer_step_and_drops_the_gradients(backend, model):
    before = logprobs(backend, model)
    rejected = Rejected(request_id=fresh(), model_id=model, error="datum 3: too long", gradients="incomplete")
    good, bad, step = run(backend, a_pass(model), rejected, a_step(model))
    assert isinstance(good, ForwardBackwardOutput)
    assert bad == ErrorResponse("datum 3: too long", "user", "incomplete")
    assert isinstance(step, ErrorResponse) and "datum 3: too long" in step.error and step.status == "user"
    assert step.gradients == "dropped"
    assert_same(logprobs(backend, model), before)


def test_a_rejected_request_that_was_no_pass_leaves_the_next_optimizer_step_alone(backend, model):
    run(backend, a_pass(model), Rejected(request_id=fresh(), model_id=model, error="bad name"))
    done(backend, a_step(model))


def refused(operation: ForwardBackward | OptimStep, gradients: GradientEffect) -> Rejected:
    return Rejected(
        request_id=operation.request_id, model_id=operation.model_id, error="not wanted any more", gradients=gradients
    )


def test_what_is_refused_while_it_waits_fails_in_its_place(backend, new_model):
    model, plain = new_model(), new_model()
    passes, step = [a_pass(model), a_pass(model, OTHER_TOKENS)], a_step(model)
    for operation in (*passes, step):
        backend.submit(operation)
    assert backend.refuse(refused(passes[1], "incomplete"))
    first, second, after = ends(backend, *passes, step)
    assert isinstance(first, ForwardBackwardOutput)
    assert second == ErrorResponse("not wanted any more", "user", "incomplete")
    assert isinstance(after, ErrorResponse) and after.gradients == "dropped"
    done(backend, a_pass(model), a_step(model), a_pass(plain), a_step(plain))
    assert_same(logprobs(backend, model), logprobs(backend, plain))


@pytest.mark.gate("torch")
def test_a_pass_that_is_refused_after_it_began_fails_and_leaves_its_model_as_a_failed_one(backend, new_model):
    model, plain = new_model(), new_model()
    long = a_pass(model, *[TOKENS] * SEVERAL_QUANTA)
    backend.submit(long)
    completed = step(backend)
    while not (completed or backend.is_working_on(model)):
        completed = step(backend)
    assert not completed and backend.refuse(refused(long, "incomplete"))
    (result,) = ends(backend, long)
    assert result == ErrorResponse("not wanted any more", "user", "incomplete")
    assert "not wanted any more" in failure(backend, a_step(model))
    done(backend, a_pass(model), a_step(model), a_pass(plain), a_step(plain))
    assert_same(logprobs(backend, model), logprobs(backend, plain))


def test_what_has_ended_is_not_refused(backend, model):
    ended = a_pass(model)
    done(backend, ended)
    assert not backend.refuse(refused(ended, "incomplete"))
    done(backend, a_step(model))


def test_a_step_of_one_model_leaves_every_bit_of_another(backend, new_model, tmp_path):
    one, other = new_model(), new_model()
    done(backend, a_pass(other), a_step(other), a_pass(other))
    before = state(backend, other, tmp_path)
    decay = ADAM.model_copy(update={"weight_decay": 0.5})
    for _ in range(3):
        done(backend, a_pass(one), OptimStep(request_id=fresh("decay"), model_id=one, adam_params=decay))
    assert state(backend, other, tmp_path) == before


def test_a_model_that_is_made_again_has_no_gradients_of_its_predecessor(backend, new_model, tmp_path):
    model, plain = new_model(), new_model()
    done(backend, a_pass(model))
    backend.delete_model(model)
    backend.create_model(model, LoraConfig(rank=4, seed=7))
    assert state(backend, model, tmp_path) == state(backend, plain, tmp_path)
