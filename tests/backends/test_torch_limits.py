"""Sequences longer than limits of the architecture (windows, chunks, original contexts) are those of transformers."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch_models import GROUPED, VOCAB, make_model, save

import oracle
from skyrl.backends.torch.base_model.attention import Packed
from skyrl.backends.torch.base_model.loading import LoadOptions
from skyrl.backends.torch.base_model.model import LoadedModel

FACTORS = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 3.0, 9.0, 20.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LIMITED = {
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **GROUPED, **EXPERTS, use_sliding_window=True, sliding_window=6, max_window_layers=2
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "llama4_text": lambda: transformers.Llama4TextConfig(
        **{**GROUPED, "num_hidden_layers": 4},
        head_dim=8,
        intermediate_size_mlp=64,
        num_local_experts=2,
        attention_chunk_size=16,
        pad_token_id=None,
    ),
    "phi3": lambda: transformers.Phi3Config(
        **GROUPED, original_max_position_embeddings=32, rope_parameters=LONGROPE, pad_token_id=None
    ),
    "phimoe": lambda: transformers.PhimoeConfig(
        **GROUPED, num_local_experts=4, rope_parameters=LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.4}
    ),
}
ROWS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (70, 24)]


def loaded(folder: Path, max_context_length: int = 0) -> LoadedModel:
    return LoadedModel(folder, torch.device("cpu"), LoadOptions(max_context_length=max_context_length))


@torch.no_grad()
def logits(model: LoadedModel, *rows: list[int]) -> list[np.ndarray]:
    """Logits of rows in one call, with padding after them."""
    tokens = torch.tensor([[*chain(*rows), 7, 7, 7]])
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(n) for n in (*lengths, 3)])[None]
    out = model.base.run(lambda: model.logits(model.hidden(tokens, positions, Packed(lengths))))[0]
    return [x.numpy() for x in out[:-3].split(lengths)]


def of_transformers(folder: Path, row: list[int], beside: int = 0) -> np.ndarray:
    """Logits of a row that is followed by `beside` other tokens."""
    with torch.no_grad():
        return oracle.logits(oracle.load(folder), row + [5] * beside)[: len(row)].numpy()


@pytest.mark.parametrize("kind", LIMITED)
def test_long_sequences_are_those_of_transformers(tmp_path, kind):
    folder = save(tmp_path, LIMITED[kind]())
    model = loaded(folder)
    wanted = [of_transformers(folder, ROWS[0]), of_transformers(folder, ROWS[1], 50 if "phi" in kind else 0)]
    found = [logits(model, row)[0] for row in ROWS]
    if model.packs:
        found += logits(model, *ROWS)
    for ours, theirs in zip(found, wanted * 2, strict=False):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["phi3", "phimoe"])
def test_short_factors_are_for_a_server_of_short_sequences(tmp_path, kind):
    folder = save(tmp_path, LIMITED[kind]())
    (found,) = logits(loaded(folder, max_context_length=32), ROWS[1])
    np.testing.assert_allclose(found, of_transformers(folder, ROWS[1]), rtol=0, atol=1e-4)
    assert np.abs(found - of_transformers(folder, ROWS[1], 50)).max() > 0.1


def test_dynamic_angles_are_those_of_the_longest_sequence(tmp_path):
    folder = save(
        tmp_path, transformers.LlamaConfig(**{**GROUPED, "max_position_embeddings": 32}, rope_parameters=DYNAMIC)
    )
    model, wanted = loaded(folder, 74), [of_transformers(folder, row, 74 - len(row)) for row in ROWS]
    for found, theirs in zip([logits(model, row)[0] for row in ROWS] + logits(model, *ROWS), wanted * 2, strict=True):
        np.testing.assert_allclose(found, theirs, rtol=0, atol=1e-4)
    assert np.abs(wanted[1] - of_transformers(folder, ROWS[1])).max() > 0.01


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_moe", "phi3"])
def test_models_with_limits_are_packed_and_sampled(tmp_path, kind):
    model = loaded(save(tmp_path, LIMITED[kind]()))
    assert model.packs and len(model.cache_shapes) == 2


def test_a_model_that_attends_twice_in_a_layer_is_packed_and_not_sampled(tmp_path, monkeypatch, caplog):
    """The second call would replace the keys of the first one in the cache."""
    attention = transformers.models.llama.modeling_llama.LlamaAttention
    forward = attention.forward

    def twice(self, hidden_states, **options):
        (first, weights), (second, _) = (forward(self, x, **options) for x in (hidden_states, hidden_states.flip(-1)))
        return first + second, weights

    monkeypatch.setattr(attention, "forward", twice)
    model = loaded(make_model(tmp_path, "llama"))
    assert (model.packs, model.cache_shapes) == (True, ())
    assert "llama is not sampled: a layer has no cache of its own" in caplog.text
