"""What every backend promises, observed from outside: through operations, completions and files only.

A new backend passes by being added to `open_backend`. Numbers are compared between two ways to reach the same state,
to rounding, never with constants of one backend.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl.backends.backend import (
    AbstractBackend,
    Completion,
    CreateModel,
    DeleteModel,
    ForwardBackward,
    LoadCheckpoint,
    LoadSnapshot,
    Operation,
    OptimStep,
    Publish,
    Rejected,
    Sample,
    SaveCheckpoint,
    SaveSnapshot,
)
from skyrl.backends.executor import Executor
from skyrl.errors import RequestError
from skyrl.types import (
    AdamParams,
    Datum,
    ErrorResponse,
    ForwardBackwardOutput,
    GradientEffect,
    LoraConfig,
    ModelOutput,
    OptimStepInput,
    OptimStepOutput,
    Origin,
    PreparedModelPassBatch,
    PreparedSampleBatch,
    Result,
    SampleOutput,
    SamplingOptions,
    SamplingParams,
    SaveOutput,
)
from tests.fakes import FakeBackend, FakeConfig
from tests.remote import RemoteBackend
from tests.remote_worker import RemoteConfig

pytestmark = pytest.mark.gpu

ADAM = AdamParams(learning_rate=0.05, weight_decay=0.01)
TOKENS = np.asarray([3, 1, 4, 1, 5, 9, 2, 6], np.int32)
OTHER_TOKENS = np.asarray([2, 7, 1, 8, 2, 8], np.int32)
SEVERAL_QUANTA = 200
"""Sequences of a pass that takes more than one turn."""
ROWS = 8
"""Sequences that are sampled at once."""
COUNTER = itertools.count()


def open_fake(folder: Path) -> Executor:
    return FakeBackend("fake", FakeConfig(rows=ROWS))


def open_jax(folder: Path) -> Executor:
    from skyrl.backends.jax import JaxBackend, JaxBackendConfig
    from tests.live import make_tiny_model

    config = JaxBackendConfig(
        max_lora_rank=8, max_lora_adapters=4, max_context_length=64, sample_max_num_sequences=ROWS
    )
    return JaxBackend(str(make_tiny_model(folder)), config)


def open_torch(folder: Path, **options) -> Executor:
    from skyrl.backends.torch import TorchBackend, TorchBackendConfig
    from tests.live import make_tiny_model

    sizes = {"max_lora_rank": 8, "max_lora_adapters": 4, "max_context_length": 64, "sample_max_num_sequences": ROWS}
    return TorchBackend(str(make_tiny_model(folder)), TorchBackendConfig(**sizes, **options))


def open_torch_processes(folder: Path) -> Executor:
    return open_torch(folder, workers="processes", num_workers=2)


def open_torch_sharded(folder: Path) -> Executor:
    return open_torch(folder, workers="processes", num_workers=2, fsdp_size=2)


def open_torch_ray(folder: Path) -> Executor:
    return open_torch(folder, workers="ray", num_workers=2, ray_resources={"CPU": 0.25})


def open_remote(folder: Path) -> Executor:
    return RemoteBackend("remote", RemoteConfig(samples=ROWS, in_flight=2))


OPENERS = [
    *(open_fake, open_jax, open_remote, open_torch, open_torch_sharded),
    *(pytest.param(opener, marks=pytest.mark.slow) for opener in (open_torch_processes, open_torch_ray)),
]


@pytest.fixture(scope="module", params=OPENERS, ids=lambda opener: opener.__name__.removeprefix("open_"))
def opener(request, tmp_path_factory) -> Iterator[Callable[[], Executor]]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder.parent))  # where Ray leaves a token
        patch.delenv("RAY_ADDRESS", raising=False)
        yield lambda: request.param(folder)


@pytest.fixture(scope="module")
def backend(opener):
    backend: Executor = opener()
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def successor(opener):
    """What takes over when `backend` is gone."""
    backend: Executor = opener()
    yield backend
    backend.close()


@pytest.fixture
def new_model(backend) -> Callable[[], str]:
    """Makes models that start from the same weights; returns their ids."""

    def make() -> str:
        model_id = f"model{next(COUNTER)}"
        backend.create_model(model_id, LoraConfig(rank=4, seed=7))
        return model_id

    return make


@pytest.fixture
def model(new_model) -> str:
    return new_model()


# -- operations, short -------------------------------------------------------------------------------------------------


def fresh(name: str = "request") -> str:
    return f"{name}{next(COUNTER)}"


def a_datum(tokens: np.ndarray) -> Datum:
    weights = np.linspace(0.5, 1.5, len(tokens) - 1, dtype=np.float32)
    return Datum(tokens[:-1], {"target_tokens": tokens[1:].astype(np.int32), "weights": weights})


def a_pass(model_id: str, *tokens: np.ndarray, forward_only: bool = False) -> ForwardBackward:
    return ForwardBackward(
        request_id=fresh("pass"),
        model_id=model_id,
        data=[a_datum(own) for own in tokens or (TOKENS,)],
        loss_fn="cross_entropy",
        forward_only=forward_only,
    )


def a_step(model_id: str) -> OptimStep:
    return OptimStep(request_id=fresh("step"), model_id=model_id, adam_params=ADAM)


def a_save(model_id: str, path) -> SaveCheckpoint:
    return SaveCheckpoint(request_id=fresh("save"), model_id=model_id, path=str(path))


def a_snapshot(model_id: str, path) -> SaveSnapshot:
    return SaveSnapshot(request_id=fresh("snapshot"), model_id=model_id, path=str(path))


def a_revival(model_id: str, snapshot: SaveOutput) -> LoadSnapshot:
    assert snapshot.digest is not None
    return LoadSnapshot(request_id=fresh("revival"), model_id=model_id, path=snapshot.path, digest=snapshot.digest)


def a_failed_pass(model_id: str, error: str = "datum 3: too long") -> Rejected:
    return Rejected(request_id=fresh(), model_id=model_id, error=error, gradients="incomplete")


def a_load(model_id: str, path, load_optimizer: bool = True) -> LoadCheckpoint:
    return LoadCheckpoint(request_id=fresh("load"), model_id=model_id, path=str(path), load_optimizer=load_optimizer)


def a_publish(model_id: str, version: str, path, persist: bool = True) -> Publish:
    path = None if path is None else str(path)
    return Publish(request_id=fresh("publish"), model_id=model_id, version=version, path=path, persist=persist)


def a_sample(version: str | None, path=None, *, seed: int = 1, max_tokens: int = 6, **options) -> Sample:
    params = SamplingParams(max_tokens=max_tokens, seed=seed, stop=[])
    path = None if path is None else str(path)
    return Sample(request_id=fresh("sample"), version=version, path=path, prompt=TOKENS[:3], params=params, **options)


def step(backend: AbstractBackend) -> list[Completion]:
    """What completes with the next step."""
    backend.wait()
    return backend.step()


def run(backend: AbstractBackend, *operations: Operation) -> list[Result]:
    """Submit all at once, step until all are done."""
    for operation in operations:
        backend.submit(operation)
    return ends(backend, *operations)


def ends(backend: AbstractBackend, *operations: Operation) -> list[Result]:
    """Step until operations that were submitted are done, and nothing else."""
    results: dict[str, Result] = {}
    while len(results) < len(operations):
        assert backend.wait(120), "nothing to do, and yet not done"
        results |= {completion.request_id: completion.result for completion in backend.step()}
    return [results[operation.request_id] for operation in operations]


def done(backend: AbstractBackend, *operations: Operation) -> list[Result]:
    """As `run`, of operations that must succeed."""
    results = run(backend, *operations)
    errors = [result for result in results if isinstance(result, ErrorResponse)]
    assert not errors, errors
    return results


def failure(backend: AbstractBackend, operation: Operation) -> str:
    """The message of an operation that must fail by its sender's fault."""
    (result,) = run(backend, operation)
    assert isinstance(result, ErrorResponse) and result.status == "user", result
    return result.error


def snapshot(backend: AbstractBackend, model_id: str, path) -> SaveOutput:
    (saved,) = done(backend, a_snapshot(model_id, path))
    assert isinstance(saved, SaveOutput)
    return saved


def state(backend: AbstractBackend, model_id: str, folder: Path) -> str | None:
    """A hash of all that the model is, equal only where every bit is."""
    return snapshot(backend, model_id, folder / fresh("state")).digest


def logprobs(backend: AbstractBackend, model_id: str) -> np.ndarray:
    """What the model thinks of a fixed text: a fingerprint of its weights."""
    (output,) = done(backend, a_pass(model_id, TOKENS, OTHER_TOKENS, forward_only=True))
    assert isinstance(output, ForwardBackwardOutput)
    return np.concatenate([datum["logprobs"] for datum in output.loss_fn_outputs])


def drawn(results: list[Result]) -> list[list[list[int]]]:
    """Tokens of each sequence of each sample."""
    assert all(isinstance(result, SampleOutput) for result in results), results
    return [[sequence.tokens.tolist() for sequence in output.sequences] for output in results]


def sampled(backend: AbstractBackend, *args, **options) -> list[list[int]]:
    return drawn(done(backend, a_sample(*args, **options)))[0]


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def differ(a: np.ndarray, b: np.ndarray) -> bool:
    return float(np.abs(a - b).max()) > 1e-4


# -- models ------------------------------------------------------------------------------------------------------------


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


def test_models_with_the_same_seed_start_equal(backend, new_model):
    first, second = new_model(), new_model()
    done(backend, *(operation for model in (first, second) for operation in (a_pass(model), a_step(model))))
    assert_same(logprobs(backend, first), logprobs(backend, second))


def test_a_rank_above_the_limit_is_refused_with_the_limit(backend):
    if backend.info().max_lora_rank >= 64:
        backend.create_model("large", LoraConfig(rank=64))
        backend.delete_model("large")
        return
    with pytest.raises(RequestError, match=rf"rank=64.*max_lora_rank={backend.info().max_lora_rank}"):
        backend.create_model("large", LoraConfig(rank=64))


@pytest.mark.parametrize("make", [a_pass, a_step], ids=["forward_backward", "optim_step"])
def test_work_on_a_model_that_does_not_exist_is_refused_by_name(backend, make):
    assert "model_id=nobody is not loaded" in failure(backend, make("nobody"))


def test_info_tells_limits_and_the_name_of_the_base_model(backend):
    info = backend.info()
    assert info.base_model and info.vocab_size > 0 and info.max_context_length > 0 and info.max_lora_rank > 0


# -- training ----------------------------------------------------------------------------------------------------------


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


def test_an_optimizer_step_reports_norm_and_learning_rate(backend, model):
    _, step = done(backend, a_pass(model), a_step(model))
    assert isinstance(step, OptimStepOutput)
    assert step.metrics["skyrl.ai/grad_norm"] > 0
    assert step.metrics["skyrl.ai/learning_rate"] == pytest.approx(ADAM.learning_rate)


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


def test_a_failed_pass_costs_one_optimizer_step_only(backend, new_model):
    failed, plain = new_model(), new_model()
    run(
        backend,
        a_pass(failed, OTHER_TOKENS),
        Rejected(request_id=fresh(), model_id=failed, error="bad", gradients="incomplete"),
        a_step(failed),
    )
    done(backend, a_pass(failed), a_step(failed))
    done(backend, a_pass(plain), a_step(plain))
    assert_same(logprobs(backend, failed), logprobs(backend, plain))


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


def test_models_that_train_at_the_same_time_do_not_change_each_other(backend, new_model):
    alone, together, neighbour = new_model(), new_model(), new_model()
    done(backend, *(operation for _ in range(3) for operation in (a_pass(alone), a_step(alone))))
    operations = []
    for _ in range(3):
        operations += [a_pass(together), a_pass(neighbour, OTHER_TOKENS), a_step(neighbour), a_step(together)]
    done(backend, *operations)
    assert_same(logprobs(backend, together), logprobs(backend, alone))
    assert differ(logprobs(backend, neighbour), logprobs(backend, alone))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_loaded_checkpoint_continues_with_the_identical_next_step(backend, model, tmp_path):
    done(backend, a_pass(model), a_step(model), a_pass(model, OTHER_TOKENS), a_step(model))
    done(backend, a_save(model, tmp_path / "save"))
    done(backend, a_pass(model), a_step(model))
    expected = logprobs(backend, model)
    resumed = fresh("resumed")
    done(backend, a_load(resumed, tmp_path / "save"))
    done(backend, a_pass(resumed), a_step(resumed))
    np.testing.assert_array_equal(logprobs(backend, resumed), expected)


def test_a_load_in_place_goes_back_to_the_saved_weights_and_drops_gradients(backend, model, tmp_path):
    done(backend, a_pass(model), a_step(model), a_save(model, tmp_path / "save"))
    saved = logprobs(backend, model)
    done(backend, a_pass(model), a_step(model), a_pass(model))
    done(backend, a_load(model, tmp_path / "save"))
    np.testing.assert_array_equal(logprobs(backend, model), saved)
    (step,) = done(backend, a_step(model))
    assert isinstance(step, OptimStepOutput) and step.metrics["skyrl.ai/grad_norm"] == 0.0


def test_a_load_without_optimizer_state_keeps_the_weights_and_starts_its_moments_anew(backend, model, tmp_path):
    done(backend, a_pass(model, OTHER_TOKENS), a_step(model), a_save(model, tmp_path / "save"))
    saved = logprobs(backend, model)
    anew = fresh("anew")
    done(backend, a_load(anew, tmp_path / "save", load_optimizer=False))
    np.testing.assert_array_equal(logprobs(backend, anew), saved)
    done(backend, a_pass(anew), a_step(anew), a_pass(model), a_step(model))
    assert differ(logprobs(backend, anew), logprobs(backend, model))


def test_loading_a_folder_that_does_not_exist_names_it_and_leaves_the_model_alone(backend, model, tmp_path):
    before = logprobs(backend, model)
    (result,) = run(backend, a_load(model, tmp_path / "nowhere"))
    assert isinstance(result, ErrorResponse) and str(tmp_path / "nowhere") in result.error
    assert_same(logprobs(backend, model), before)


def test_a_load_that_follows_its_save_without_waiting_for_it_finds_it(backend, model, tmp_path):
    done(backend, a_pass(model), a_step(model))
    saved = logprobs(backend, model)
    for i in range(3):
        path = tmp_path / str(i)
        done(backend, a_save(model, path), a_pass(model), a_step(model), a_load(model, path))
        np.testing.assert_array_equal(logprobs(backend, model), saved)


def test_training_goes_on_while_a_checkpoint_of_the_state_before_is_written(backend, model, tmp_path):
    saved = logprobs(backend, model)
    done(backend, a_save(model, tmp_path / "save"), a_pass(model), a_step(model))
    loaded = fresh("loaded")
    done(backend, a_load(loaded, tmp_path / "save"))
    assert_same(logprobs(backend, loaded), saved)


# -- snapshots ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pending", [False, True], ids=["without gradients", "with pending gradients"])
def test_a_model_revived_from_its_snapshot_elsewhere_goes_on_bit_for_bit(backend, successor, model, tmp_path, pending):
    done(backend, a_pass(model), a_step(model))
    if pending:
        done(backend, a_pass(model, OTHER_TOKENS))
    saved = snapshot(backend, model, tmp_path / "snapshot")
    next_steps = [a_pass(model), a_step(model), a_pass(model, OTHER_TOKENS, TOKENS)]
    done(backend, *next_steps)
    done(successor, a_revival(model, saved), *next_steps)
    assert state(successor, model, tmp_path) == state(backend, model, tmp_path)
    np.testing.assert_array_equal(logprobs(successor, model), logprobs(backend, model))


def test_repeating_what_came_after_a_snapshot_gives_the_same_bits(backend, successor, model, tmp_path):
    rounds = [[a_pass(model, *tokens), a_step(model)] for tokens in 2 * [(TOKENS,), (OTHER_TOKENS, TOKENS)] + [()]]
    for operations in rounds[:2]:
        done(backend, *operations)
    saved = snapshot(backend, model, tmp_path / "snapshot")
    for operations in rounds[2:]:
        done(backend, *operations)
    done(successor, a_revival(model, saved), *(operation for operations in rounds[2:] for operation in operations))
    assert state(successor, model, tmp_path) == state(backend, model, tmp_path)


def test_repeating_a_model_from_its_creation_gives_the_same_bits(backend, successor, model, tmp_path):
    operations = [a_pass(model), a_step(model), a_pass(model, OTHER_TOKENS)]
    done(backend, *operations)
    done(successor, CreateModel(request_id=fresh(), model_id=model, lora_config=LoraConfig(rank=4, seed=7)))
    done(successor, *operations)
    assert state(successor, model, tmp_path) == state(backend, model, tmp_path)


def test_a_snapshot_leaves_its_model_as_it_is(backend, new_model, tmp_path):
    plain, saved = new_model(), new_model()
    done(backend, a_pass(plain), a_pass(plain), a_step(plain))
    done(backend, a_pass(saved), a_snapshot(saved, tmp_path / "snapshot"), a_pass(saved), a_step(saved))
    assert state(backend, saved, tmp_path) == state(backend, plain, tmp_path)


def test_a_snapshot_after_a_failed_pass_and_the_news_of_it_fail_the_next_step_elsewhere(
    backend, successor, model, tmp_path
):
    run(backend, a_pass(model), a_failed_pass(model))
    cause = backend.failed_pass(model)
    assert cause == "datum 3: too long"
    saved = snapshot(backend, model, tmp_path / "snapshot")
    for engine in (backend, successor):
        if engine is successor:
            run(engine, a_revival(model, saved), a_failed_pass(model, cause))
        failed, *_ = run(engine, a_step(model), a_pass(model, OTHER_TOKENS), a_step(model))
        assert isinstance(failed, ErrorResponse) and cause in failed.error
        assert engine.failed_pass(model) is None
    assert state(successor, model, tmp_path) == state(backend, model, tmp_path)


def test_a_revival_replaces_what_there_is_of_the_model(backend, model, tmp_path):
    saved = snapshot(backend, model, tmp_path / "snapshot")
    run(backend, a_pass(model), a_step(model), a_failed_pass(model))
    done(backend, a_revival(model, saved))
    assert backend.failed_pass(model) is None
    assert state(backend, model, tmp_path) == saved.digest


def test_a_snapshot_of_a_model_that_does_not_exist_is_refused(backend, tmp_path):
    assert "model_id=nobody is not loaded" in failure(backend, a_snapshot("nobody", tmp_path / "snapshot"))


@pytest.mark.parametrize("write", [a_save, a_snapshot, lambda model, path: a_publish(model, fresh("version"), path)])
def test_what_is_saved_is_told_with_the_hash_of_its_manifest(backend, model, tmp_path, write):
    (saved,) = done(backend, write(model, tmp_path / "saved"))
    assert isinstance(saved, SaveOutput)
    assert saved.digest == hashlib.sha256((tmp_path / "saved" / "manifest.json").read_bytes()).hexdigest()
    assert saved.size_bytes is not None and saved.size_bytes > 0


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (a_save, lambda model, path, digest: LoadCheckpoint(request_id="r", model_id=model, path=path, digest=digest)),
        (
            a_snapshot,
            lambda model, path, digest: LoadSnapshot(request_id="r", model_id=model, path=path, digest=digest),
        ),
    ],
    ids=["checkpoint", "snapshot"],
)
def test_a_folder_that_is_not_the_one_that_was_written_is_not_loaded(backend, model, tmp_path, write, read):
    (right,) = done(backend, write(model, tmp_path / "right"))
    done(backend, a_pass(model), a_step(model))
    (other,) = done(backend, write(model, tmp_path / "other"))
    assert isinstance(right, SaveOutput) and isinstance(other, SaveOutput)
    before = state(backend, model, tmp_path)
    (result,) = run(backend, read(model, str(tmp_path / "right"), other.digest))
    assert isinstance(result, ErrorResponse) and result.status == "server" and "right" in result.error
    assert state(backend, model, tmp_path) == before
    assert not isinstance(run(backend, read(model, str(tmp_path / "other"), other.digest))[0], ErrorResponse)


# -- what a failure means to the gradients -----------------------------------------------------------------------------


def test_every_failure_says_what_it_leaves_of_the_gradients(backend, model, tmp_path):
    outcomes = [
        (a_failed_pass(model), "incomplete"),
        (a_step(model), "dropped"),
        (Rejected(request_id=fresh(), model_id=model, error="bad name"), "kept"),
        (a_pass("nobody"), "kept"),
        (a_failed_pass("nobody"), "kept"),
        (a_step("nobody"), "kept"),
        (a_load(model, tmp_path / "nowhere"), "kept"),
        (Rejected(request_id=fresh(), model_id=model, error="of its failed pass", gradients="dropped"), "dropped"),
    ]
    results = run(backend, *(operation for operation, _ in outcomes))
    effects = [result.gradients for result in results if isinstance(result, ErrorResponse)]
    assert effects == [effect for _, effect in outcomes]


def test_a_repeated_failure_of_a_step_clears_the_sums_and_the_failed_pass(backend, new_model, tmp_path):
    plain, repeated = new_model(), new_model()
    done(backend, a_pass(plain, OTHER_TOKENS), a_step(plain))
    run(
        backend,
        a_pass(repeated),
        a_failed_pass(repeated),
        Rejected(request_id=fresh(), model_id=repeated, error="of its failed pass", gradients="dropped"),
    )
    assert backend.failed_pass(repeated) is None
    done(backend, a_pass(repeated, OTHER_TOKENS), a_step(repeated))
    assert state(backend, repeated, tmp_path) == state(backend, plain, tmp_path)


def test_abandoned_operations_leave_their_model_as_it_was(backend, model, tmp_path):
    done(backend, a_pass(model))
    before = state(backend, model, tmp_path)
    operations = [a_pass(model, *[OTHER_TOKENS] * SEVERAL_QUANTA), a_step(model)]
    for operation in operations:
        backend.submit(operation)
    backend.step()
    assert backend.abandon() == operations
    assert not backend.computed
    assert state(backend, model, tmp_path) == before


# -- versions and samples ----------------------------------------------------------------------------------------------


def test_a_published_version_stays_as_it_was_while_its_model_trains_on_and_is_deleted(backend, model, tmp_path):
    done(backend, a_pass(model), a_step(model))
    version = fresh("version")
    done(backend, a_publish(model, version, tmp_path / "version", persist=False))
    before = sampled(backend, version, num_samples=4)
    done(backend, *(operation for _ in range(5) for operation in (a_pass(model), a_step(model))))
    later = fresh("version")
    done(backend, a_publish(model, later, tmp_path / "later"))
    assert sampled(backend, version, num_samples=4) == before
    assert sampled(backend, later, num_samples=4) != before
    backend.delete_model(model)
    assert sampled(backend, version, num_samples=4) == before


@pytest.mark.parametrize("republish", [False, True], ids=["dropped", "published-again"])
def test_samples_that_wait_are_drawn_from_the_version_that_they_asked_for(backend, model, republish):
    version = fresh("version")
    done(backend, a_publish(model, version, None))
    seeds = range(6 * ROWS)
    expected = drawn(done(backend, *(a_sample(version, seed=seed) for seed in seeds)))
    done(backend, *(operation for _ in range(5) for operation in (a_pass(model), a_step(model))))
    waiting = [a_sample(version, seed=seed) for seed in seeds]
    for operation in waiting:
        backend.submit(operation)
    later = a_publish(model, version if republish else fresh("version"), None)
    backend.submit(later)
    results: dict[str, Result] = {}
    while later.request_id not in results:
        results |= {completion.request_id: completion.result for completion in backend.step()}
    assert len(results) < len(waiting), "all were drawn before the new weights were there"
    if not republish:
        backend.drop_version(version)
    while len(results) <= len(waiting):
        results |= {completion.request_id: completion.result for completion in backend.step()}
    ended = [results[operation.request_id] for operation in waiting]
    assert drawn(ended) == expected
    stamps = {origin for output in ended for sequence in output.sequences for origin in sequence.origins}
    assert stamps == {Origin(0, version, backend.info().base_id)}
    assert drawn(done(backend, *(a_sample(later.version, seed=seed) for seed in seeds))) != expected
    if not republish:
        assert f"version={version} is not known here" in failure(backend, a_sample(version))


@pytest.mark.parametrize("num_samples", [1, 5], ids=["of one", "of several"])
def test_a_flood_of_samples_delays_another_tenants_by_what_runs_and_one_turn(backend, num_samples):
    flood = [
        a_sample(None, seed=seed, max_tokens=4 + seed % 5, num_samples=num_samples, tenant="flood")
        for seed in range(6 * ROWS)
    ]
    late = a_sample(None, max_tokens=4, tenant="late")
    for operation in flood:
        backend.submit(operation)
    while not step(backend):
        pass
    backend.submit(late)
    meanwhile: list[Completion] = []
    while late.request_id not in {completion.request_id for completion in meanwhile}:
        meanwhile += step(backend)
    assert len(meanwhile) - 1 <= 2 * ROWS
    for operation in flood:
        backend.cancel(operation.request_id)


def test_sampling_leaves_the_model_that_trains_alone(backend, model, tmp_path):
    version = fresh("version")
    done(backend, a_publish(model, version, tmp_path / "version"), a_pass(model), a_step(model))
    before = logprobs(backend, model)
    sampled(backend, version)
    assert_same(logprobs(backend, model), before)


def test_a_persisted_version_is_on_disk_when_it_is_acknowledged_and_samples_the_same_from_there(
    backend, model, tmp_path
):
    done(backend, a_pass(model), a_step(model))
    version, path = fresh("version"), tmp_path / "version"
    done(backend, a_publish(model, version, path))
    assert path.is_dir()
    before = sampled(backend, version)
    backend.drop_version(version)
    assert sampled(backend, version, path) == before


def test_a_version_that_was_published_at_once_is_told_when_it_is_on_disk(backend, model, tmp_path):
    stored = {}
    backend.on_stored = stored.__setitem__
    version = fresh("version")
    (published,) = done(backend, a_publish(model, version, tmp_path / "version", persist=False))
    assert published == SaveOutput(str(tmp_path / "version"))
    snapshot(backend, model, tmp_path / "snapshot")
    manifest = (tmp_path / "version" / "manifest.json").read_bytes()
    assert stored[version].path == str(tmp_path / "version")
    assert stored[version].digest == hashlib.sha256(manifest).hexdigest()


def test_a_version_that_could_not_be_written_is_written_before_the_next_snapshot_or_it_fails(backend, model, tmp_path):
    blocked, version = tmp_path / "blocked", fresh("version")
    blocked.write_text("a file where a folder should be")
    done(backend, a_publish(model, version, blocked / "version", persist=False))
    before = sampled(backend, version)
    (failed,) = run(backend, a_snapshot(model, tmp_path / "snapshot"))
    assert isinstance(failed, ErrorResponse) and failed.status == "server" and version in failed.error
    blocked.unlink()
    snapshot(backend, model, tmp_path / "snapshot")
    backend.drop_version(version)
    assert sampled(backend, version, blocked / "version") == before


def test_a_version_that_could_not_be_written_and_was_deleted_holds_up_no_snapshot(backend, model, tmp_path):
    blocked, version = tmp_path / "blocked", fresh("version")
    blocked.write_text("a file where a folder should be")
    done(backend, a_publish(model, version, blocked / "version", persist=False))
    backend.drop_version(version)
    snapshot(backend, model, tmp_path / "snapshot")


def test_a_version_that_cannot_be_written_is_no_matter_to_other_models(backend, new_model, tmp_path):
    blocked, version, model = tmp_path / "blocked", fresh("version"), new_model()
    blocked.write_text("a file where a folder should be")
    done(backend, a_publish(model, version, blocked / "version", persist=False))
    snapshot(backend, new_model(), tmp_path / "snapshot")
    backend.drop_version(version)


def test_an_unknown_version_is_refused_by_name(backend):
    assert "version=nobody is not known here" in failure(backend, a_sample("nobody"))


def test_publishing_a_model_that_does_not_exist_is_refused(backend, tmp_path):
    assert "model_id=nobody is not loaded" in failure(backend, a_publish("nobody", "v", tmp_path / "v"))


def test_the_same_seed_samples_the_same_and_another_does_not(backend):
    assert sampled(backend, None, seed=3, max_tokens=12) == sampled(backend, None, seed=3, max_tokens=12)
    assert sampled(backend, None, seed=3, max_tokens=12) != sampled(backend, None, seed=4, max_tokens=12)


def test_samples_of_a_request_differ_and_the_first_does_not_depend_on_their_number(backend):
    several = sampled(backend, None, max_tokens=12, num_samples=3)
    assert several[0] != several[1] != several[2]
    assert sampled(backend, None, max_tokens=12) == several[:1]


def test_a_sample_ends_at_its_limit_with_a_logprob_per_token(backend):
    (output,) = done(backend, a_sample(None, max_tokens=5))
    assert isinstance(output, SampleOutput)
    (sequence,) = output.sequences
    assert sequence.tokens.shape == sequence.logprobs.shape == (5,)
    assert sequence.stop_reason == "length"


def test_samples_are_stamped_with_the_version_and_the_base_that_they_were_drawn_from(backend, model):
    names = [fresh("version") for _ in range(6)]
    done(backend, *(a_publish(model, name, None) for name in names))
    asked = [None, *names, *names, None]
    for version, output in zip(asked, done(backend, *(a_sample(one, num_samples=2) for one in asked)), strict=True):
        assert isinstance(output, SampleOutput)
        for sequence in output.sequences:
            assert sequence.origins == (Origin(0, version, backend.info().base_id),)


def test_a_sample_ends_with_its_stop_token(backend):
    ((first, *_),) = sampled(backend, None)
    params = SamplingParams(max_tokens=6, seed=1, stop=[first])
    (output,) = done(backend, Sample(request_id=fresh(), version=None, prompt=TOKENS[:3], params=params, num_samples=1))
    assert isinstance(output, SampleOutput)
    assert output.sequences[0].tokens.tolist() == [first] and output.sequences[0].stop_reason == "stop"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingOptions)])
def test_a_sampling_option_is_served_or_refused_by_its_name(backend, name):
    value: Any = {"stop_token_ids": (1,), "min_tokens": 2, "repetition_penalty": 1.5}.get(name, 0.5)
    request = dataclasses.replace(a_sample(None), options=SamplingOptions(**{name: value}))
    (output,) = run(backend, request)
    if name in backend.info().sampling_options:
        assert isinstance(output, SampleOutput)
        return
    assert isinstance(output, ErrorResponse) and output.status == "user"
    assert output.error.startswith(f"{name}={value} is not served by this backend")
    assert output.error.endswith("; leave it out")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 1.1),
        ("min_p", -0.1),
        ("min_p", float("nan")),
        ("min_tokens", -1),
        ("min_tokens", 6),
        ("stop_token_ids", (2**31,)),
        ("stop_token_ids", (-1,)),
    ],
)
def test_a_sampling_option_out_of_its_range_is_refused(backend, name, value):
    request = dataclasses.replace(a_sample(None, max_tokens=5), options=SamplingOptions(**{name: value}))
    (output,) = run(backend, request)
    assert isinstance(output, ErrorResponse) and output.status == "user" and output.error.startswith(name)


def test_a_routing_key_changes_nothing_of_what_is_drawn(backend):
    plain, keyed = a_sample(None), dataclasses.replace(a_sample(None), routing_key="conversation")
    outputs = [done(backend, request)[0] for request in (plain, keyed)]
    first, second = (output.sequences[0].tokens for output in outputs)
    np.testing.assert_array_equal(first, second)


def test_prompt_logprobs_have_one_entry_per_prompt_token_and_none_for_the_first(backend):
    (output,) = done(backend, a_sample(None, prompt_logprobs=True))
    assert isinstance(output, SampleOutput) and output.prompt_logprobs is not None
    assert output.prompt_logprobs.shape == (3,)
    assert np.isnan(output.prompt_logprobs[0]) and np.isfinite(output.prompt_logprobs[1:]).all()


def test_a_cancelled_sample_gets_no_completion_and_others_finish(backend):
    cancelled, kept = a_sample(None, max_tokens=50), a_sample(None)
    for operation in (cancelled, kept):
        backend.submit(operation)
    completions = backend.step()
    backend.cancel(cancelled.request_id)
    while backend.busy or backend.computed:
        backend.wait(120)
        completions += backend.step()
    assert [completion.request_id for completion in completions] == [kept.request_id]


def test_cancelling_something_unknown_is_ignored(backend):
    backend.cancel("nothing")


def test_a_short_sample_finishes_before_a_long_one_that_began_earlier(backend):
    long, short = a_sample(None, max_tokens=50), a_sample(None, max_tokens=1)
    finished = []
    for operation in (long, short):
        backend.submit(operation)
    while len(finished) < 2:
        backend.wait(120)
        finished += [completion.request_id for completion in backend.step()]
    assert finished == [short.request_id, long.request_id]


def test_samples_finish_while_models_train(backend, model):
    operations = [operation for _ in range(10) for operation in (a_pass(model), a_step(model))]
    sample = a_sample(None, max_tokens=1)
    for operation in (*operations, sample):
        backend.submit(operation)
    finished = []
    while len(finished) < len(operations) + 1:
        backend.wait(120)
        finished += [completion.request_id for completion in backend.step()]
    assert finished.index(sample.request_id) < finished.index(operations[-1].request_id)


# -- documented synchronous methods ------------------------------------------------------------------------------------


def pass_batch(*rows: tuple[str, np.ndarray], loss_fn: str = "cross_entropy") -> PreparedModelPassBatch:
    """A batch with one request per (model_id, tokens); request ids are "0", "1", ..."""
    data = [a_datum(tokens) for _, tokens in rows]
    return PreparedModelPassBatch(
        all_input_ids=[datum.tokens.tolist() for datum in data],
        all_targets=[datum.loss_fn_inputs["target_tokens"].tolist() for datum in data],
        all_token_weights=[datum.loss_fn_inputs["weights"].tolist() for datum in data],
        all_sampling_logprobs=[[] for _ in data],
        all_advantages=[[] for _ in data],
        all_model_ids=[model_id for model_id, _ in rows],
        all_loss_fns=[loss_fn for _ in data],
        all_loss_fn_configs=[None for _ in data],
        request_batch_slices=[(str(i), model_id, i, i + 1) for i, (model_id, _) in enumerate(rows)],
    )


def test_a_prepared_batch_of_two_models_trains_each_on_its_own_rows(backend, new_model):
    first, second, expected = new_model(), new_model(), new_model()
    outputs = backend.forward_backward(pass_batch((first, TOKENS), (second, OTHER_TOKENS)))
    assert sorted(outputs) == ["0", "1"]
    metrics = backend.optim_step(first, OptimStepInput(ADAM)).metrics
    assert metrics["skyrl.ai/grad_norm"] > 0
    done(backend, a_pass(expected, TOKENS), a_step(expected))
    assert_same(logprobs(backend, first), logprobs(backend, expected))


def test_a_prepared_forward_returns_what_forward_backward_returns(backend, model):
    looked = backend.forward(pass_batch((model, TOKENS)))["0"]
    trained = backend.forward_backward(pass_batch((model, TOKENS)))["0"]
    assert_same(looked.loss_fn_outputs[0]["logprobs"], trained.loss_fn_outputs[0]["logprobs"])


def test_a_bad_row_of_a_prepared_batch_fails_alone(backend, new_model):
    good, bad = new_model(), new_model()
    outside = np.asarray([1, backend.info().vocab_size, 2], np.int32)
    outputs = backend.forward_backward(pass_batch((good, TOKENS), (bad, outside)))
    assert isinstance(outputs["0"], ForwardBackwardOutput)
    assert outputs["1"].status == "user" and str(backend.info().vocab_size) in outputs["1"].error


@pytest.mark.parametrize("token", [2**40, 2**70, -(2**70)])
def test_a_token_beyond_any_integer_type_fails_its_request_alone(backend, new_model, token):
    good, bad = new_model(), new_model()
    batch = pass_batch((good, TOKENS), (bad, TOKENS))
    batch.all_input_ids[1][0] = token
    outputs = backend.forward_backward(batch)
    assert isinstance(outputs["0"], ForwardBackwardOutput)
    assert outputs["1"].status == "user" and "model_input" in outputs["1"].error
    params = SamplingParams(max_tokens=1, seed=1)
    prompts = PreparedSampleBatch(
        all_prompts=[[1], [token]],
        all_sampling_params=[params] * 2,
        all_model_ids=["", ""],
        all_checkpoint_ids=["", ""],
        request_batch_slices=[("good", "", 0, 1, False), ("bad", "", 1, 2, False), ("empty", "", 2, 2, False)],
    )
    samples = backend.sample(prompts)
    assert isinstance(samples["good"], SampleOutput)
    assert samples["bad"].status == "user" and "prompt" in samples["bad"].error
    assert samples["empty"].status == "user"


def test_inputs_without_a_column_of_their_own_reach_the_loss(backend, model):
    batch = pass_batch((model, TOKENS))
    batch.all_loss_fn_inputs.append({"reward": [1.0]})
    outputs = backend.forward(batch)
    assert "loss_fn_inputs['reward'] is not an input of cross_entropy" in outputs["0"].error


def test_a_synchronous_call_keeps_completions_of_others_for_the_next_step(backend, model):
    others = [a_pass(model), a_sample(None, max_tokens=1)]
    for operation in others:
        backend.submit(operation)
    while sum(operation.request_id in {c.request_id for c in backend._ready} for operation in others) < 2:
        backend.forward(pass_batch((model, TOKENS)))
    assert backend.busy and backend.wait(0)
    completions = backend.step()
    assert {completion.request_id for completion in completions} >= {operation.request_id for operation in others}


def test_an_optimizer_step_of_an_unknown_model_raises(backend):
    with pytest.raises(RequestError, match="model_id=nobody is not loaded"):
        backend.optim_step("nobody", OptimStepInput(ADAM))


def test_checkpoint_methods_write_and_read_folders(backend, model, tmp_path):
    backend.forward_backward(pass_batch((model, TOKENS)))
    backend.optim_step(model, OptimStepInput(ADAM))
    backend.save_checkpoint(str(tmp_path / "save"), model)
    saved = logprobs(backend, model)
    backend.forward_backward(pass_batch((model, TOKENS)))
    backend.optim_step(model, OptimStepInput(ADAM))
    backend.load_checkpoint(str(tmp_path / "save"), model)
    np.testing.assert_array_equal(logprobs(backend, model), saved)


def test_a_sampler_checkpoint_is_sampled_by_model_and_checkpoint_id(backend, model, tmp_path):
    backend.save_sampler_checkpoint(str(tmp_path / "0001"), model)
    params = SamplingParams(max_tokens=4, seed=1, stop=[])
    batch = PreparedSampleBatch(
        all_prompts=[[1, 2, 3]] * 3,
        all_sampling_params=[params] * 3,
        all_model_ids=[model, model, ""],
        all_checkpoint_ids=["0001", "0001", ""],
        request_batch_slices=[("two", model, 0, 2, True), ("base", "", 2, 3, False)],
    )
    outputs = backend.sample(batch)
    assert [len(outputs[request_id].sequences) for request_id in ("two", "base")] == [2, 1]
    assert outputs["two"].prompt_logprobs is not None and outputs["base"].prompt_logprobs is None
