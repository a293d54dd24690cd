"""Models of several residual streams: as those of one at the start, of every family; then packed, cached, in banks."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import RANK_4, compiled, gradients, hidden, positions_of, trained_adapter, with_connectors

from skyrl.tx.io.weights import load_model
from skyrl.tx.lora import all_targets, empty_bank, init_adapter, write_slot, zero_adapter
from skyrl.tx.models.types import KVCache
from skyrl.types import AdapterConfig, LoraConfig
from tests.tx.family_models import CONFIGS, write_model

RATE = 4


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def models(request, tmp_path_factory):
    """A family's model by its number of residual streams and other options."""
    folder = write_model(request.param, tmp_path_factory.mktemp("streams") / request.param)
    return cache(lambda rate=RATE, **options: load_model(folder, mhc_expansion_rate=rate, **options))


qwen3 = pytest.mark.parametrize("models", ["Qwen3ForCausalLM"], indirect=True)
two = pytest.mark.parametrize("models", ["DeepseekV3ForCausalLM", "Olmo2ForCausalLM"], indirect=True)
IDS = np.random.default_rng(1).integers(0, 318, (2, 13)).astype(np.int32)


def in_chunks(model, adapter) -> jax.Array:
    """Final hidden states of prompts that are read in two chunks, and then decoded token by token."""
    outputs, cache = [], KVCache.zeros(model.config, 2, 16, jnp.float32, page_size=4)
    for start, end in [(0, 8), (8, 11), (11, 12), (12, 13)]:
        chunk = IDS[:, start:end]
        output = compiled(model)(chunk, positions=positions_of(chunk, start), adapter=adapter, kv_cache=cache)
        cache = output.kv_cache
        outputs.append(output.last_hidden_state)
    return jnp.concatenate(outputs, axis=1)


def packed(model, adapter) -> jax.Array:
    """Final hidden states of rows of two sequences, of 7 and 6 tokens."""
    segments, positions = jnp.asarray([[0] * 7 + [1] * 6] * 2), jnp.asarray([[*range(7), *range(6)]] * 2)
    return hidden(model, IDS, positions=positions, segment_ids=segments, adapter=adapter)


@pytest.mark.full
@pytest.mark.gate("Qwen3ForCausalLM-packed")
@pytest.mark.parametrize("run", [packed, in_chunks])
def test_a_fresh_adapter_of_four_streams_computes_what_it_does_with_one(models, run):
    adapters = [trained_adapter(models(rate).config, RANK_4) for rate in (1, RATE)]
    one, four = (run(models(rate), adapter) for rate, adapter in zip((1, RATE), adapters, strict=True))
    np.testing.assert_allclose(four, one, atol=1e-4)


@pytest.mark.full
@qwen3
def test_unrolled_layers_of_four_streams_compute_what_scanned_ones_do(models):
    adapter = with_connectors(trained_adapter(models().config, RANK_4))
    unrolled = models(unroll_layers=True)
    np.testing.assert_allclose(packed(unrolled, adapter), packed(models(), adapter), atol=1e-4)


@pytest.mark.full
@qwen3
def test_hidden_states_are_the_means_of_streams(models):
    def states(rate: int) -> list[jax.Array]:
        model = models(rate)
        graph, base = nnx.split(model)
        options = {"positions": positions_of(IDS), "adapter": trained_adapter(model.config, RANK_4)}
        run = jax.jit(lambda base, ids: nnx.merge(graph, base)(ids, **options, output_hidden_states=True))
        return run(base, jnp.asarray(IDS)).hidden_states

    for one, four in zip(*map(states, (1, RATE)), strict=True):
        np.testing.assert_allclose(four, one, atol=1e-4)


@pytest.mark.full
@two
def test_with_trained_connectors_packed_sequences_and_decoding_equal_the_full_pass(models):
    model, adapter = models(), with_connectors(trained_adapter(models().config, RANK_4))
    full = hidden(model, IDS, adapter=adapter)
    assert np.abs(full - hidden(model, IDS, adapter=trained_adapter(model.config, RANK_4))).max() > 0.1
    np.testing.assert_allclose(in_chunks(model, adapter), full, atol=1e-4)
    np.testing.assert_allclose(packed(model, adapter)[:, :7], full[:, :7], atol=1e-4)


@pytest.mark.full
@two
def test_gradients_of_connectors_are_equal_with_checkpoints_and_reach_each_of_them(models):
    adapter = with_connectors(trained_adapter(models().config, RANK_4))
    found = gradients(models(), adapter, IDS)[1]
    again = gradients(models(gradient_checkpointing=True), adapter, IDS)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, again)
    for layers in (part for name, part in found.items() if name.startswith("layers")):
        for name in ("attn_connector", "mlp_connector"):
            assert all(np.any(leaf[layer]) for leaf in layers[name].values() for layer in range(len(leaf)))


def bank_of(model, *adapters):
    targets = all_targets(model.config)
    bank = empty_bank(targets, adapters[0], len(adapters), model.config.unroll_layers)
    for slot, adapter in enumerate(adapters):
        bank = write_slot(targets, bank, slot, adapter)
    return bank


@pytest.mark.full
@qwen3
@pytest.mark.parametrize("unrolled", [False, True])
def test_rows_of_a_bank_have_their_own_connectors_or_none(models, unrolled):
    model = models(unroll_layers=unrolled)
    adapters = [with_connectors(trained_adapter(model.config, RANK_4, seed), seed) for seed in (0, 1)]
    adapters[0] = trained_adapter(model.config, AdapterConfig(rank=4, exclude_modules=".*_connector"))
    bank, ids = bank_of(model, *adapters), np.concatenate([IDS, IDS[:1]])
    together = hidden(model, ids, adapter=bank, adapter_index=jnp.asarray([1, 0, -1]))
    for row, adapter in enumerate([adapters[1], adapters[0], zero_adapter(model.config, 8)]):
        np.testing.assert_allclose(together[row], hidden(model, ids[row : row + 1], adapter=adapter)[0], atol=1e-4)


@qwen3
def test_connectors_that_are_not_finite_leave_rows_of_other_adapters_bit_identical(models):
    model, healthy = models(), with_connectors(trained_adapter(models().config, RANK_4))
    broken = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * np.float32("nan" if path[-1].key == "phi" else 1), healthy.weights
    )
    results = [
        hidden(model, IDS, adapter=bank_of(model, healthy, second), adapter_index=jnp.asarray([0, 1]))
        for second in (healthy, healthy._replace(weights=broken))
    ]
    assert np.isnan(results[1][1]).all()
    np.testing.assert_array_equal(results[0][0], results[1][0])


@qwen3
@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        (LoraConfig(rank=4), {"attn_connector", "mlp_connector"}),
        (LoraConfig(rank=4, train_attn=False), {"mlp_connector"}),
        (AdapterConfig(rank=4, target_modules=r".*q_proj|.*attn_connector"), {"attn_connector"}),
        (AdapterConfig(rank=4, exclude_modules=".*_connector"), set()),
    ],
    ids=["all", "feed-forward", "by name", "none"],
)
def test_connectors_are_chosen_like_modules_and_others_have_no_gradient(models, settings, trained):
    gradient = gradients(models(), trained_adapter(models().config, settings), IDS)[1]["layers"]
    found = {
        name for name in ("attn_connector", "mlp_connector") if any(np.any(leaf) for leaf in gradient[name].values())
    }
    assert found == trained


@qwen3
def test_connectors_are_parameters_of_adapters(models):
    weights = zero_adapter(models().config, 8).weights
    assert all(models().is_lora_param(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(weights))


@qwen3
def test_with_one_stream_there_is_no_connector_in_the_tree_nor_in_the_program(models):
    def program(rate: int) -> str:
        model = models(rate)
        graph, base = nnx.split(model)
        adapter = init_adapter(model.config, RANK_4, 0, 8)
        run = lambda base, ids: nnx.merge(graph, base)(ids, positions=ids, adapter=adapter).last_hidden_state  # noqa: E731
        assert (rate > 1) == ("attn_connector" in adapter.weights["layers"])
        return str(jax.make_jaxpr(run)(base, jnp.zeros((1, 8), jnp.int32)))

    has_streams = {rate: "[1,8,4,32]" in program(rate) for rate in (1, RATE)}
    assert has_streams == {1: False, RATE: True}
