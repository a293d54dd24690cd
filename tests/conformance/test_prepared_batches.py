"""The documented synchronous methods, on batches of several requests."""

import numpy as np
import pytest

from skyrl.types import (
    ForwardBackwardOutput,
    OptimStepInput,
    PreparedModelPassBatch,
    PreparedSampleBatch,
    SampleOutput,
    SamplingParams,
)
from tests.conformance.operations import (
    ADAM,
    OTHER_TOKENS,
    TOKENS,
    a_datum,
    a_pass,
    a_sample,
    a_step,
    assert_same,
    done,
    logprobs,
)

pytestmark = pytest.mark.gpu


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


@pytest.mark.gate("torch")
def test_a_prepared_batch_of_two_models_trains_each_on_its_own_rows(backend, new_model):
    first, second, expected = new_model(), new_model(), new_model()
    outputs = backend.forward_backward(pass_batch((first, TOKENS), (second, OTHER_TOKENS)))
    assert sorted(outputs) == ["0", "1"]
    metrics = backend.optim_step(first, OptimStepInput(ADAM)).metrics
    assert metrics["skyrl.ai/grad_norm"] > 0
    done(backend, a_pass(expected, TOKENS), a_step(expected))
    assert_same(logprobs(backend, first), logprobs(backend, expected))


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
