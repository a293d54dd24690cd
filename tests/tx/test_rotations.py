"""Frequencies of rotary embedding, against those of transformers."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers import Gemma3TextConfig, LlamaConfig, PhiConfig, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from skyrl.tx.design.rotations import frequencies
from skyrl.tx.io.weights import load_model
from skyrl.tx.layers.rope import Rotation
from skyrl.tx.models.configs import ModelConfig
from tests.tx.family_models import write_model
from tests.tx.tiny_models import hidden, positions_of

FACTORS = [1.0 + i / 8 for i in range(32)], [1.0 + i for i in range(32)]
KINDS = {
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32_768},
    "yarn of DeepSeek": {
        "factor": 40.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 4096,
    },
    "yarn not truncated": {"factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
    "longrope": {
        "short_factor": FACTORS[0],
        "long_factor": FACTORS[1],
        "original_max_position_embeddings": 4096,
        "factor": 32.0,
    },
}
MAXIMUM = 131_072


def wrapped(config, **options) -> ModelConfig:
    return ModelConfig(config, max_lora_adapters=2, max_lora_rank=8, shard_attention_heads=False, **options)


def llama(**members) -> LlamaConfig:
    return LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=MAXIMUM, **members)


def same(found, expected: torch.Tensor, factor: float) -> None:
    """Two libraries may round powers differently: by two units in the last place, of 1.2e-7 each."""
    np.testing.assert_allclose(np.asarray(found.values, np.float32), expected.numpy(), rtol=2.5e-7)
    assert found.factor == pytest.approx(factor, rel=1e-7)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_the_frequencies_of_transformers(kind, spelling):
    name = kind.split()[0]
    if spelling == "rope_parameters":
        config = llama(rope_parameters={"rope_type": name, "rope_theta": 500_000.0, **KINDS[kind]})
        read = wrapped(config)
    else:  # a config.json from before, read without transformers' help
        scaling = {"type" if spelling == "type" else "rope_type": name, **KINDS[kind]}
        config = llama(rope_scaling=dict(scaling), rope_theta=500_000.0)
        members = config.to_dict()
        del members["rope_parameters"]
        read = SimpleNamespace(**members | {"rope_scaling": scaling, "rope_theta": 500_000.0})
    longest = MAXIMUM
    expected, factor = ROPE_INIT_FUNCTIONS[name](config, seq_len=longest)
    same(frequencies(read), expected, factor)


@pytest.mark.parametrize(("served", "factors"), [(4096, 0), (4097, 1)])
def test_longrope_has_one_set_of_frequencies_for_all_that_is_served(served, factors):
    config = llama(rope_parameters={"rope_type": "longrope", "rope_theta": 10_000.0, **KINDS["longrope"]})
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=served)
    found = frequencies(wrapped(config, max_context_length=served))
    same(found, expected, factor)
    plain = 1 / 10_000.0 ** (np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(plain / np.asarray(found.values), FACTORS[factors], rtol=1e-5)


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10_000.0), (128, 1_000_000.0), (256, 500_000.0)])
def test_plain_frequencies_are_those_of_transformers(head_dim, theta):
    config = llama(head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": theta})
    same(frequencies(wrapped(config)), *LlamaRotaryEmbedding.compute_default_rope_parameters(config))


def test_a_file_that_says_nothing_has_the_base_of_transformers():
    same(frequencies(wrapped(Qwen2Config())), 1 / 10_000.0 ** (torch.arange(0, 128, 2) / 128), 1.0)


def test_each_type_of_layer_has_its_own():
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0}
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    config = Gemma3TextConfig(rope_parameters={"full_attention": scaled, "sliding_attention": plain})
    for kind, base, factor in [("full_attention", 1e6, 8), ("sliding_attention", 1e4, 1)]:
        expected = 1 / base ** (torch.arange(0, 256, 2) / 256) / factor
        np.testing.assert_allclose(frequencies(wrapped(config), kind).values, expected, rtol=1e-5)


def test_partial_rotations_turn_the_first_dimensions_only():
    config = PhiConfig(hidden_size=256, num_attention_heads=4, partial_rotary_factor=0.5)
    found = frequencies(wrapped(config), partial=True)
    same(found, *PhiRotaryEmbedding.compute_default_rope_parameters(config))
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 64)).astype(np.float32)
    positions = np.array([[0, 7, 100_000]], np.int32)
    turned = np.asarray(Rotation.at(jnp.asarray(positions), found).apply(jnp.asarray(x)))
    angles = positions[0].astype(np.float32)[:, None] * np.asarray(found.values, np.float32)[None]
    pairs = x[0, :, :, :16] + 1j * x[0, :, :, 16:32]
    expected = pairs * np.exp(1j * angles.astype(np.float64))[:, None]
    np.testing.assert_allclose(turned[0, :, :, :16], expected.real, atol=1e-5)
    np.testing.assert_allclose(turned[0, :, :, 16:32], expected.imag, atol=1e-5)
    np.testing.assert_array_equal(turned[..., 32:], x[..., 32:])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "mrope"}, "rope_type='mrope' is not implemented"),
        ({"rope_type": "linear"}, "rope_parameters have no factor"),
        (
            {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 and rope_type='linear': not implemented",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(parameters, message):
    members = llama().to_dict() | {"rope_parameters": {"rope_theta": 1e4} | parameters}
    with pytest.raises(ValueError, match=message):
        frequencies(SimpleNamespace(**members))


LONGROPE = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 3.0, 9.0, 30.0]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TOP = "original_max_position_embeddings"
FILES = {
    "longrope": {TOP: 4096, "rope_scaling": {"type": "longrope", **LONGROPE}},
    "longrope, twice": {TOP: 4096, "rope_scaling": {"type": "longrope", TOP: 1024, **LONGROPE}},
    "yarn": {TOP: 4096, "rope_scaling": {"rope_type": "yarn", "factor": 32.0}},
    "llama3": {TOP: 4096, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "longrope of transformers 5": {TOP: 4096, "rope_parameters": {"rope_type": "longrope", **LONGROPE}},
    "longrope, inside": {"rope_scaling": {"type": "longrope", TOP: 4096, **LONGROPE}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "default, with a part that Llama does not know": {"partial_rotary_factor": 0.5},
    "dynamic, with a length": {TOP: 4096, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
}
"""Members of config.json."""


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory) -> Path:
    return write_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


@pytest.mark.parametrize("start", [0, 20_000])
@pytest.mark.parametrize("kind", FILES)
def test_whole_models_have_the_logits_of_transformers(kind, start, small_llama, tmp_path):
    """Sequences below and above 4096 tokens, served with maximum lengths that are below and above it, too."""
    folder = shutil.copytree(small_llama, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 10_000.0} | FILES[kind]))
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = np.random.default_rng(1).integers(0, 318, (2, 13)).astype(np.int32)
    with torch.no_grad():
        positions = torch.arange(start, start + 13)[None]
        expected = theirs.eval()(torch.as_tensor(ids, dtype=torch.int64), position_ids=positions).logits
    ours = load_model(folder, max_context_length=0 if start else 4096)
    found = ours.compute_logits(hidden(ours, ids, positions=positions_of(ids, start)))
    np.testing.assert_allclose(found, expected, atol=1e-4)
