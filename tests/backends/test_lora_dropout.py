"""Dropout of what adapters read: as PEFT's in its statistics, off where nothing is trained, the same when repeated.

Where B is zero the gradient of B is linear in what A reads, so that gradient norms tell how much of it was dropped.
"""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

import oracle
from driver import finish, forward_backward, load, new_id, publish, random_datum, save, stepping
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.operations import CreateModel
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import AdapterConfig, ErrorResponse, ForwardBackwardOutput, LoraConfig, OptimStepOutput

DATUM = random_datum(20)
RATE = 0.5
DRAWS = 40
KINDS = {"torch": (TorchBackend, TorchBackendConfig, {}), "jax": (JaxBackend, JaxBackendConfig, {"warm_up": False})}

Backend = JaxBackend | TorchBackend


def made(name: str, model: Path, **options) -> Backend:
    backend, config, more = KINDS[name]
    return backend(str(model), config(max_lora_rank=8, **more, **options))


@pytest.fixture(scope="module", params=KINDS)
def backend(tiny_model, request) -> Iterator[Backend]:
    backend = made(request.param, tiny_model)
    yield backend
    backend.close()


def created(backend: Backend, dropout: float = RATE, seed: int = 0) -> str:
    model, config = new_id(), AdapterConfig(rank=4, seed=seed, train_unembed=False, dropout=dropout)
    finish(backend, CreateModel(request_id=new_id(), model_id=model, lora_config=config))
    return model


def test_dropout_before_an_adapted_vocabulary_projection_is_refused(backend):
    config = AdapterConfig(rank=4, target_modules=".*(q_proj|lm_head)", dropout=RATE)
    refused = finish(backend, CreateModel(request_id=new_id(), model_id=new_id(), lora_config=config))
    assert isinstance(refused, ErrorResponse) and refused.status == "user"
    assert re.match(r"lora_config.dropout=0.5 and lm_head is adapted: .* set dropout=0", refused.error)


def norm(backend: Backend, model: str, learning_rate: float = 0.0, datum=DATUM) -> float:
    """Gradient norm of a step."""
    forward_backward(backend, [datum], model)
    stepped = finish(backend, stepping(model, learning_rate))
    assert isinstance(stepped, OptimStepOutput), stepped
    return stepped.metrics["skyrl.ai/grad_norm"]


def logprobs(backend: Backend, model: str, forward_only: bool = True) -> np.ndarray:
    output = forward_backward(backend, [DATUM], model, forward_only=forward_only)
    assert isinstance(output, ForwardBackwardOutput), output
    return output.loss_fn_outputs[0]["logprobs"]


def norm_of_peft(model) -> float:
    model.zero_grad()
    rows = torch.log_softmax(oracle.logits(model, DATUM.tokens.tolist()), -1)
    targets = torch.tensor(DATUM.loss_fn_inputs["target_tokens"].astype(np.int64))
    (-rows.gather(-1, targets[:, None]).sum()).backward()
    return float(np.sqrt(sum(np.square(x).sum() for x in oracle.gradients(model).values())))


@pytest.fixture(scope="module")
def norms_of_peft(backend, tiny_model, tmp_path_factory) -> tuple[float, np.ndarray]:
    """Gradient norms of a fresh adapter, which is the same on all backends: without dropout, and with."""
    folder = tmp_path_factory.mktemp("peft") / "adapter"
    publish(backend, new_id(), folder, created(backend))
    description = folder / "adapter_config.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | {"lora_dropout": RATE}))
    theirs = oracle.load(tiny_model, folder)
    without = norm_of_peft(theirs)
    theirs.train()
    torch.manual_seed(0)
    return without, np.asarray([norm_of_peft(theirs) for _ in range(DRAWS)])


@pytest.mark.full
def test_gradients_are_distributed_as_those_of_peft(backend, norms_of_peft):
    without, expected = norms_of_peft
    model = created(backend)
    ours = np.asarray([norm(backend, model) for _ in range(DRAWS)])
    error = np.hypot(expected.std(), ours.std()) / np.sqrt(DRAWS)
    assert abs(ours.mean() - expected.mean()) < 4 * error < 0.3 * (expected.mean() - without)
    assert 0.6 < ours.std() / expected.std() < 1.6


def test_what_is_not_trained_on_has_none(backend, tiny_model, tmp_path):
    model = created(backend)
    norm(backend, model, learning_rate=0.05)
    publish(backend, new_id(), tmp_path / "adapter", model)
    theirs = oracle.load(tiny_model, tmp_path / "adapter")
    with torch.no_grad():
        expected = oracle.logprobs(theirs, DATUM.tokens.tolist()).numpy()
    np.testing.assert_allclose(logprobs(backend, model)[:-1], expected, atol=1e-4)
    assert np.abs(logprobs(backend, model, forward_only=False)[:-1] - expected).max() > 1e-3


def test_dropout_of_nothing_changes_nothing(backend):
    model, plain = created(backend, dropout=0.0), new_id()
    config = LoraConfig(rank=4, seed=0, train_unembed=False)
    finish(backend, CreateModel(request_id=new_id(), model_id=plain, lora_config=config))
    assert [norm(backend, model, 0.05) for _ in range(2)] == [norm(backend, plain, 0.05) for _ in range(2)]


def test_masks_are_of_the_seed_the_step_and_the_data(backend):
    model, again, other = created(backend), created(backend), created(backend, seed=1)
    first, second = ([norm(backend, one) for _ in range(3)] for one in (model, again))
    assert first == second and len(set(first)) == 3
    assert norm(backend, other) not in first
    more = random_datum(20, seed=5)
    assert norm(backend, model, datum=more) == norm(backend, again, datum=more)


def test_a_model_that_is_saved_and_loaded_goes_on_bit_for_bit(backend, tmp_path):
    model, other = created(backend), new_id()
    norm(backend, model, 0.05)
    save(backend, tmp_path / "saved", model)
    load(backend, tmp_path / "saved", other)
    assert [norm(backend, model, 0.05) for _ in range(2)] == [norm(backend, other, 0.05) for _ in range(2)]
    assert (logprobs(backend, model) == logprobs(backend, other)).all()


@pytest.mark.full("jax")
def test_what_is_computed_again_for_the_backward_pass_is_dropped_again(backend, tiny_model):
    """On JAX it also is by layers in a loop, where it else is by layers in a row."""
    name = "torch" if isinstance(backend, TorchBackend) else "jax"
    saving = made(name, tiny_model, gradient_checkpointing=True)
    ours, theirs = created(backend), created(saving)
    got = [norm(saving, theirs, 0.05) for _ in range(3)]
    saving.close()
    np.testing.assert_allclose(got, [norm(backend, ours, 0.05) for _ in range(3)], rtol=1e-4)


def test_experts_have_the_mean_gradient_of_no_dropout(tmp_path):
    """PEFT has no dropout on experts. While B is 0, its gradient is linear in what A reads, so dropout is unbiased."""
    sizes = {"hidden": 32, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 48, "vocab": 384}
    with closing(made("jax", make_model(tmp_path / "model", arch="qwen3_moe", **sizes, seed=0))) as backend:
        assert isinstance(backend, JaxBackend)

        def gradient(model: str) -> np.ndarray:
            forward_backward(backend, [DATUM], model)
            pairs = jax.tree_util.tree_flatten_with_path(backend.accumulated_grads[model])[0]
            found = [np.ravel(x) for path, x in pairs if "experts" in str(path) and "lora_B" in str(path)]
            finish(backend, stepping(model, 0.0))
            return np.concatenate(found)

        plain, model = gradient(created(backend, dropout=0.0)), created(backend)
        drawn = np.asarray([gradient(model) for _ in range(DRAWS)])
    error = np.square(drawn.mean(0) - plain).sum() / (drawn.var(0, ddof=1).sum() / DRAWS)
    assert drawn.std(0).max() > 0 and 0.4 < error < 2.5
