"""A backend over a bfloat16 base, as accelerators run it: within what rounding activations to 8 bits does."""

import jax
import numpy as np
import pytest
import torch

import driver
import oracle
from driver import create, forward_backward, publish, random_datum, train
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import SaveOutput

pytestmark = pytest.mark.gpu

SIZE = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 192, "vocab": 512}


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    """With a model that has learned something, of as many layers as make a loop of them."""
    folder = make_model(tmp_path_factory.mktemp("half") / "half", **SIZE, layers=9, dtype="bfloat16")
    config = JaxBackendConfig(
        dtype="bfloat16", train_tile_tokens=128, max_context_length=256, compilation_cache=False, warm_up=False
    )
    jax.devices()  # XLA has read its flags
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS", raising=False)  # sampling programs over bfloat16 run long where nothing is optimised
        backend = JaxBackend(str(folder), config)
    create(backend)
    train(backend, steps=5)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def version(backend, tmp_path_factory) -> tuple[str, str]:
    """Name and folder of the model's weights."""
    folder = tmp_path_factory.mktemp("published") / "adapter"
    assert isinstance(publish(backend, "published", folder), SaveOutput)
    return "published", str(folder)


def scored(backend, tokens: np.ndarray) -> np.ndarray:
    """The trainer's log-probability of each token after the first."""
    item = driver.datum(tokens[:-1], tokens[1:])
    return forward_backward(backend, [item], forward_only=True).loss_fn_outputs[0]["logprobs"]


@pytest.mark.full
def test_log_probabilities_are_those_of_transformers_in_float32_to_rounding(backend, version):
    tokens = random_datum(100, vocab=SIZE["vocab"]).tokens
    model = oracle.load(backend.base_model, version[1])
    with torch.no_grad():
        expected = oracle.logprobs(model, tokens.tolist()).numpy()
    difference = scored(backend, tokens) - expected
    assert np.sqrt(np.mean(difference**2)) < 0.02
    assert abs(difference.mean()) < 0.01


@pytest.mark.full
def test_the_sampler_has_the_trainers_log_probabilities_to_rounding(backend, version):
    prompt = random_datum(70, vocab=SIZE["vocab"]).tokens
    sampled = driver.sample(backend, version[0], num_samples=4, prompt=prompt.tolist(), max_tokens=50).sequences
    for sequence in sampled:
        whole = np.concatenate([prompt, sequence.tokens])
        difference = sequence.logprobs - scored(backend, whole)[len(prompt) - 1 :]
        assert np.sqrt(np.mean(difference**2)) < 0.02
        assert abs(difference).max() < 0.1


@pytest.mark.full
def test_gradients_of_the_adapter_are_those_of_peft_in_float32_to_rounding(backend, version):
    backend.discard_gradients("model")
    item = random_datum(100, vocab=SIZE["vocab"])
    forward_backward(backend, [item])
    model = oracle.load(backend.base_model, version[1])
    (-oracle.logprobs(model, [*item.tokens.tolist(), int(item.loss_fn_inputs["target_tokens"][-1])]).sum()).backward()
    expected = oracle.gradients(model)
    for block, modules in backend.accumulated_grads["model"]["layers"].items():
        for module, pair in modules.items():
            for name, rank in (("lora_A", np.s_[1, :, :4]), ("lora_B", np.s_[1, :4])):
                ours = np.asarray(pair[name])[rank].T
                value = expected[f"base_model.model.model.layers.1.{block}.{module}.{name}.weight"]
                assert np.linalg.norm(ours - value) < 0.05 * np.linalg.norm(value), (block, module, name)
