import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from tiny_models import RANK_4, compiled, gradients, hidden, positions_of, trained_adapter
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl.tx.io.weights import load_model
from skyrl.tx.layers.logprobs import logprobs_of
from skyrl.tx.lora import Adapter, empty_bank, lora_targets, write_slot, zero_adapter
from skyrl.tx.models.configs import ModelConfig
from skyrl.tx.models.decoder import Decoder
from skyrl.tx.models.types import KVCache
from skyrl.types import LoraConfig

pytestmark = pytest.mark.gpu

unrolled_is_slow = pytest.mark.parametrize(
    "load",
    [pytest.param(True, id="unrolled", marks=pytest.mark.slow), pytest.param(False, id="scanned")],
    indirect=True,
)
"""Layers that are unrolled are those of every tiny model in the other tests; those of large models are scanned."""


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_logits_equal_those_of_transformers(kind, load, reference, ids):
    model = load(kind)
    with torch.no_grad():
        expected = reference(kind)(torch.as_tensor(ids)).logits.numpy()
    np.testing.assert_allclose(model.compute_logits(hidden(model, ids)), expected, atol=1e-4)


def test_attention_bias_and_a_bfloat16_checkpoint_are_read(tmp_path, ids):
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=24,
        intermediate_size=40,
        vocab_size=320,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    reference = Qwen3ForCausalLM(config)
    for name, parameter in reference.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    reference = reference.to(torch.bfloat16)
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    model = load_model(tmp_path, dtype="float32")
    with torch.no_grad():
        expected = reference.to(torch.float32)(torch.as_tensor(ids)).logits.numpy()
    np.testing.assert_allclose(model.compute_logits(hidden(model, ids)), expected, atol=1e-4)


def test_hidden_states_equal_those_of_transformers(load, reference, ids):
    with torch.no_grad():
        expected = reference()(torch.as_tensor(ids), output_hidden_states=True).hidden_states
    states = load()(jnp.asarray(ids), positions=positions_of(ids), output_hidden_states=True).hidden_states
    assert len(states) == len(expected) == 3
    for ours, theirs in zip(states, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)


@pytest.mark.full
@unrolled_is_slow
@pytest.mark.parametrize(
    "page_size", [pytest.param(size, marks=() if size == 4 else pytest.mark.slow) for size in (1, 2, 4, 64)]
)
def test_pages_of_any_size_in_any_order_equal_the_full_pass(load, ids, page_size):
    model = load()
    cache = KVCache.zeros(model.config, 3, 12, jnp.float32, page_size)
    order = np.random.default_rng(0).permutation(cache.table.size).astype(np.int32)
    cache = cache._replace(table=jnp.asarray(order.reshape(cache.table.shape)))
    outputs = []
    for start, end in [(0, 5), (5, 6), (6, 7), (7, 11)]:
        chunk = ids[:, start:end]
        output = compiled(model)(chunk, positions=positions_of(chunk, start), kv_cache=cache)
        cache = output.kv_cache
        outputs.append(output.last_hidden_state)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), hidden(model, ids), atol=1e-4)


@pytest.mark.full
@unrolled_is_slow
def test_rows_that_share_a_page_read_the_same(load, ids):
    model = load()
    empty = KVCache.zeros(model.config, 3, 12, jnp.float32, page_size=4)
    first = empty._replace(table=empty.table[:1])
    read = compiled(model)(ids[:1, :4], kv_cache=first).kv_cache
    shared = read._replace(table=empty.table.at[1, 0].set(empty.table[0, 0])[:2])
    tokens = jnp.asarray([[ids[0, 4]], [ids[1, 4]]])
    step = hidden(model, tokens, positions=jnp.full((2, 1), 4), kv_cache=shared)
    for row in (0, 1):
        alone = hidden(model, np.asarray([[*ids[0, :4], ids[row, 4]]]))
        np.testing.assert_allclose(step[row, 0], alone[0, 4], atol=1e-5)


def test_rows_of_a_cache_may_be_at_different_positions(load, ids):
    model = load()
    cache = compiled(model)(ids[:, :6], kv_cache=KVCache.zeros(model.config, 3, 8, jnp.float32)).kv_cache
    rows, at = np.arange(3), np.array([2, 6, 4])
    step = hidden(model, ids[rows, at][:, None], positions=jnp.asarray(at[:, None]), kv_cache=cache)
    np.testing.assert_allclose(step[:, 0], hidden(model, ids)[rows, at], atol=1e-5)


@pytest.mark.full
def test_what_is_left_in_a_cache_does_not_matter_even_if_it_is_nan(load, ids):
    empty, outputs = KVCache.zeros(load().config, 3, 8, jnp.float32), []
    for filling in (0.0, np.nan):
        keys, values = (tuple(leaf + filling for leaf in leaves) for leaves in (empty.keys, empty.values))
        cache = KVCache(keys, values, empty.table)
        cache = compiled(load())(ids[:, :4], kv_cache=cache).kv_cache
        token = ids[:, 4:5]
        outputs.append(hidden(load(), token, positions=positions_of(token, 4), kv_cache=cache))
    np.testing.assert_array_equal(*outputs)


def test_a_position_past_the_capacity_changes_nothing_in_the_cache(load, ids):
    model = load()
    cache = KVCache.zeros(model.config, 3, 4, jnp.float32, page_size=2)
    written = compiled(model)(ids[:, :1], positions=jnp.full((3, 1), 4), kv_cache=cache).kv_cache
    assert not any(np.any(leaf) for leaf in (*written.keys, *written.values))


def test_decoding_updates_a_donated_cache_in_place(load):
    model = load()
    graph, base = nnx.split(model)

    def step(base, cache, ids, positions):
        return nnx.merge(graph, base)(ids, positions=positions, kv_cache=cache).kv_cache

    cache = KVCache.zeros(model.config, 4, 4096, jnp.float32)
    token = jnp.zeros((4, 1), jnp.int32)
    memory = jax.jit(step, donate_argnums=1).lower(base, cache, token, token).compile().memory_analysis()
    whole = sum(leaf.nbytes for leaf in (*cache.keys, *cache.values))
    assert memory.alias_size_in_bytes >= whole
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < whole / 100
    assert memory.temp_size_in_bytes < whole / 10


def bank_of(adapters: list[Adapter], config: ModelConfig) -> Adapter:
    """A bank whose slot i is adapter i."""
    targets = lora_targets(config)
    bank = empty_bank(targets, adapters[0], len(adapters), config.unroll_layers)
    for slot, adapter in enumerate(adapters):
        bank = write_slot(targets, bank, slot, adapter)
    return bank


@pytest.mark.full
@unrolled_is_slow
def test_a_row_without_a_slot_gives_what_the_base_model_gives(load, ids):
    model = load()
    bank = bank_of([trained_adapter(model.config, RANK_4, seed) for seed in (1, 2)], model.config)
    mixed = hidden(model, ids, adapter=bank, adapter_index=jnp.asarray([1, -1, 0]))
    np.testing.assert_allclose(mixed[1], hidden(model, ids[1:2])[0], atol=1e-5)


@pytest.mark.full
@unrolled_is_slow
def test_a_slot_of_a_bank_gives_what_its_adapter_gives_alone(load, ids):
    model = load()
    adapters = [
        zero_adapter(model.config, 8),
        trained_adapter(load().config, RANK_4, 1),
        trained_adapter(load().config, LoraConfig(rank=7, alpha=5), 2),
    ]
    bank, slots = bank_of(adapters, model.config), jnp.asarray([2, 0, 1])
    together = hidden(model, ids, adapter=bank, adapter_index=slots)
    logits = model.compute_logits(together[:, -1], bank, slots)
    for row, slot in enumerate([2, 0, 1]):
        alone = hidden(model, ids[row : row + 1], adapter=adapters[slot])
        np.testing.assert_allclose(together[row], alone[0], atol=1e-5)
        np.testing.assert_allclose(logits[row], model.compute_logits(alone[0, -1], adapters[slot]), atol=1e-5)


@pytest.mark.full
@unrolled_is_slow
def test_log_probabilities_of_a_bank_are_those_of_its_adapters(load, ids):
    model, adapters = load(), [trained_adapter(load().config, RANK_4, 1), trained_adapter(load().config, RANK_4, 2)]
    rows, targets, slots = hidden(model, ids)[0, :5], jnp.asarray(ids[:2, :5].T), np.array([0, 1, 1, 0, 1])
    bank = bank_of(adapters, model.config)
    together = logprobs_of(model.compute_logits(rows, bank, jnp.asarray(slots)), targets)
    alone = [model.target_scores(rows, targets, adapter=adapter).logprobs for adapter in adapters]
    np.testing.assert_allclose(together, np.where(slots[:, None] == 0, *alone), atol=1e-5)


def test_nan_in_one_slot_leaves_the_rows_of_others_bit_identical(load, ids):
    model, healthy = load(), trained_adapter(load().config, RANK_4, 1)
    slots = jnp.asarray([0, 1, 0])
    results = []
    for neighbour in (healthy, jax.tree.map(lambda leaf: jnp.full_like(leaf, np.nan), healthy)):
        bank = bank_of([healthy, neighbour], model.config)
        states = hidden(model, ids, adapter=bank, adapter_index=slots)
        results.append((states, model.compute_logits(states[:, -1], bank, slots)))
    for clean, poisoned in zip(*results, strict=True):
        assert np.isnan(poisoned[1]).all()
        np.testing.assert_array_equal(clean[::2], poisoned[::2])


@pytest.mark.full
@unrolled_is_slow
def test_chunks_leave_log_probabilities_and_gradients_equal(load, ids):
    adapter = trained_adapter(load().config)
    whole, chunked = (gradients(load(), adapter, ids, chunk_size=chunk_size) for chunk_size in (0, 7))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), whole, chunked)


def test_padding_of_the_rank_has_no_gradient(load, ids):
    _, gradient = gradients(load(), trained_adapter(load().config), ids)

    def check(path, leaf):
        padding = leaf[..., 4:] if path[-1].key == "lora_A" else leaf[..., 4:, :]
        assert not np.any(padding) and np.any(leaf)

    jax.tree_util.tree_map_with_path(check, gradient)


def test_modules_that_are_not_trained_have_no_gradient(load, ids):
    _, gradient = gradients(
        load(), trained_adapter(load().config, LoraConfig(rank=4, train_mlp=False, train_unembed=False)), ids
    )
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((gradient["layers"]["mlp"], gradient["lm_head"])))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient["layers"]["self_attn"]))


@pytest.mark.full
@unrolled_is_slow
def test_a_stack_of_adapters_maps_to_one_result_each(load, ids):
    model, adapters = load(), [trained_adapter(load().config, seed=seed) for seed in (1, 2)]
    graph, base = nnx.split(model)

    def logprobs(base, adapter, row):
        model = nnx.merge(graph, base)
        states = model(row[None], positions=positions_of(row[None]), adapter=adapter).last_hidden_state[0]
        return model.target_scores(states, row[:, None], adapter=adapter, chunk_size=4).logprobs

    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *adapters)
    together = jax.jit(jax.vmap(logprobs, in_axes=(None, 0, 0)))(base, stack, jnp.asarray(ids[:2]))
    alone = [logprobs(base, adapter, jnp.asarray(row)) for adapter, row in zip(adapters, ids[:2], strict=True)]
    np.testing.assert_allclose(together, jnp.stack(alone), atol=1e-5)


@pytest.mark.full
def test_log_probabilities_over_150_thousand_tokens_are_accurate_over_a_bfloat16_base():
    vocab, tokens = 151_936, 6
    config = _config(vocab_size=vocab)
    model = Decoder(config, dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    states = jnp.asarray(rng.normal(0, 10, (tokens, 32)), jnp.bfloat16)
    targets = jnp.asarray(rng.integers(0, vocab, (tokens, 2)), jnp.int32)
    logits = np.asarray(states, np.float64) @ np.asarray(model.unembed[...], np.float64).T
    expected = np.take_along_axis(logits, np.asarray(targets), 1) - np.log(np.exp(logits).sum(1, keepdims=True))
    for chunk_size in (0, 4):
        ours = model.target_scores(states, targets, chunk_size=chunk_size).logprobs
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, expected, atol=1e-4)


def test_adapters_are_applied_in_float32_over_a_bfloat16_base(load, ids):
    model, adapter = load(dtype="bfloat16"), trained_adapter(load().config)
    states = hidden(model, ids[:1], adapter=adapter)[0]
    assert states.dtype == jnp.bfloat16
    change = model.compute_logits(states, adapter) - model.compute_logits(states)
    pair = {name: np.asarray(matrix, np.float64) for name, matrix in adapter.weights["lm_head"].items()}
    expected = 8.0 * np.asarray(states, np.float64) @ pair["lora_A"] @ pair["lora_B"]
    np.testing.assert_allclose(change, expected, atol=1e-5)


def test_only_adapters_are_lora_parameters(load):
    model = load()
    assert all(
        model.is_lora_param(path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(trained_adapter(load().config).weights)
    )
    assert not any(model.is_lora_param(path, leaf) for path, leaf in nnx.to_flat_state(nnx.state(model)))
    assert model.get_model_config() is model.config


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "rope_type='mrope' is not implemented"),
        ({"rope_scaling": {"type": "su", "factor": 4.0}}, "rope_type='su' is not implemented"),
        ({"layer_types": ["linear_attention"]}, "layer_types has linear_attention, which is not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not implemented"),
    ],
)
def test_what_is_not_implemented_is_refused(option, message):
    with pytest.raises(ValueError, match=message):
        Decoder(_config(**option), dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))


def _config(**members) -> ModelConfig:
    """A small configuration as an older config.json spells it."""
    base = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "vocab_size": 64,
    }
    return ModelConfig(
        base | members,
        max_lora_adapters=1,
        max_lora_rank=8,
        shard_attention_heads=True,
    )
