"""Decode steps of models with the layers of Llama: tokens and log-probabilities are those of transformers' modules."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_models import CONFIGS, make_model

import oracle
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.common.page_table import PAGE_SIZE
from skyrl.backends.common.sampling.model_runner import BURST, Rows
from skyrl.backends.torch.base_model.loading import LoadOptions
from skyrl.backends.torch.base_model.model import LoadedModel, Weights
from skyrl.backends.torch.sampling.sampling_worker import SamplingWorker
from skyrl.types import LoraConfig
from tests.live import make_tiny_model

FIRST = (5, 311, 40)
LENGTH = 2 * BURST
WINDOWED = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen2", "windows", "mistral"])
def loaded(request, tmp_path_factory) -> tuple[Path, LoadedModel]:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    if request.param == "qwen3":
        make_tiny_model(folder)
    elif request.param == "windows":
        make_model(folder, "qwen2", **WINDOWED, layer_types=["full_attention", "sliding_attention"])
    else:
        make_model(folder, request.param)
    return folder, LoadedModel(folder, torch.device("cpu"), LoadOptions())


def decoded(model: LoadedModel, versions, slots, first=FIRST) -> tuple[np.ndarray, np.ndarray]:
    """Most likely tokens `[rows, 1 + LENGTH]` from these first ones, in two calls, and their log-probabilities."""
    worker, count = SamplingWorker(model), len(first)
    worker.open(1 + 2 * count, 0)
    sequences, logprobs = np.asarray(first, np.int32)[:, None], []
    for call in range(LENGTH // BURST):
        rows = Rows.idle(count, 2)
        rows.tokens[:], rows.positions[:], rows.limits[:] = sequences[:, -1], call * BURST, BURST
        rows.table[:], rows.slots[:] = 1 + np.arange(2 * count).reshape(count, 2), slots
        drawn = worker.decode(versions, (1, 2), rows, BURST, False)
        sequences = np.concatenate([sequences, drawn.tokens.T], 1)
        logprobs.append(drawn.logprobs.T)
    assert LENGTH < 2 * PAGE_SIZE
    return sequences, np.concatenate(logprobs, 1)


def check_with(hf, sequences: np.ndarray, logprobs: np.ndarray) -> None:
    """Check that tokens and log-probabilities are those of a model of transformers."""
    for tokens, scores in zip(sequences.tolist(), logprobs, strict=True):
        with torch.no_grad():
            wanted = torch.log_softmax(oracle.logits(hf, tokens).float(), -1)[:-1]
        np.testing.assert_array_equal(wanted.argmax(-1).numpy(), tokens[1:])
        np.testing.assert_allclose(scores, wanted.max(-1).values.numpy(), rtol=0, atol=1e-4)


def shifted(model: LoadedModel) -> dict[str, torch.Tensor]:
    """Weights of a fully trained model."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: x.detach() + 0.05 * torch.randn(x.shape, generator=generator) for name, x in model.base.parameters.items()
    }


def adapter(model: LoadedModel, seed: int, rank: int) -> Weights:
    kind, generator = Kind(LoraConfig(rank=rank)), torch.Generator().manual_seed(seed)
    layout = model.layout(kind)
    return Weights(kind, layout.views(0.1 * torch.randn(layout.size, generator=generator)))


@pytest.mark.parametrize("first", [FIRST, FIRST[:1]], ids=["3 rows", "1 row"])
def test_steps_of_the_base_model_are_those_of_transformers(loaded, first):
    folder, model = loaded
    assert model.step is not None
    check_with(oracle.load(folder), *decoded(model, [None], -1, first))


def test_steps_of_a_full_model_use_its_weights_and_then_those_of_the_base(loaded):
    folder, model = loaded
    before, hf = decoded(model, [None], -1), oracle.load(folder)
    weights = shifted(model)
    hf.load_state_dict(weights, strict=False)
    check_with(hf, *decoded(model, [Weights(Kind(LoraConfig(rank=0)), weights)], -1))
    np.testing.assert_array_equal(decoded(model, [None], -1)[1], before[1])


@pytest.mark.parametrize("slots", [[1, 1, 1], [0, -1, 1]], ids=["one adapter", "bank"])
def test_adapters_have_the_effect_of_hooks_on_modules(loaded, slots, monkeypatch):
    _, model = loaded
    versions = [adapter(model, seed, rank) for seed, rank in ((1, 2), (2, 8))]
    sequences, logprobs = decoded(model, versions, slots)
    monkeypatch.setattr(model, "step", None)
    wanted = decoded(model, versions, slots)
    np.testing.assert_array_equal(sequences, wanted[0])
    np.testing.assert_allclose(logprobs, wanted[1], rtol=0, atol=1e-5)
    assert np.abs(logprobs - decoded(model, [None], -1)[1]).max() > 0.01


@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - {"llama", "qwen2", "mistral"}))
def test_other_layers_and_other_scales_keep_their_modules(kind, tmp_path):
    """The modules of Granite have the names and types of Llama's."""
    options = {"residual_multiplier": 0.3} if kind == "granite" else {}
    folder = make_model(tmp_path, kind, **options)
    assert LoadedModel(folder, torch.device("cpu"), LoadOptions()).step is None
