"""Compiled runs of tiny models, and adapters that do something."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.lora import init_adapter
from skyrl.tx.models.types import ModelForCausalLM
from skyrl.types import LoraConfig

SIZES = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 48, "vocab": 320}
PADDED_RANK = 8
RANK_4 = LoraConfig(rank=4)


def positions_of(ids, start=0) -> jax.Array:
    """start, start + 1, ... in each row."""
    return jnp.broadcast_to(jnp.arange(start, start + ids.shape[1], dtype=jnp.int32)[None], ids.shape)


@cache
def compiled(model: ModelForCausalLM):
    """The model's call as a compiled function; tokens and options are arrays."""
    graph, base = nnx.split(model)
    run = jax.jit(lambda base, ids, options: nnx.merge(graph, base)(ids, **options))
    return lambda ids, **options: run(base, jnp.asarray(ids), {"positions": positions_of(ids)} | options)


def hidden(model: ModelForCausalLM, ids, **options) -> jax.Array:
    """Final hidden states `[batch, tokens, hidden]`."""
    return compiled(model)(ids, **options).last_hidden_state


@cache
def _compiled_gradients(model: ModelForCausalLM, chunk_size: int):
    graph, base = nnx.split(model)

    def objective(weights, base, scaling, ids, token_weights):
        model, adapter = nnx.merge(graph, base), Adapter(weights, scaling)
        states = model(ids, positions=positions_of(ids), adapter=adapter).last_hidden_state[:, :-1]
        rows, targets = states.reshape(-1, states.shape[-1]), ids[:, 1:].reshape(-1, 1)
        logprobs = model.target_scores(rows, targets, adapter=adapter, chunk_size=chunk_size).logprobs
        return (logprobs.reshape(token_weights.shape) * token_weights).sum()

    run = jax.jit(jax.value_and_grad(objective))
    return lambda adapter, ids, weights: run(adapter.weights, base, adapter.scaling, ids, weights)


def gradients(model: ModelForCausalLM, adapter: Adapter, ids, token_weights=None, chunk_size=0):
    """Sum over tokens of weight * log-probability of the next token, and its gradient in the adapter's weights."""
    weights = np.ones((ids.shape[0], ids.shape[1] - 1), np.float32) if token_weights is None else token_weights
    return _compiled_gradients(model, chunk_size)(adapter, jnp.asarray(ids), jnp.asarray(weights))


def trained_adapter(config, lora_config: LoraConfig = RANK_4, seed: int = 0) -> Adapter:
    """A padded adapter whose B is random where its A is, as after some training."""
    adapter = init_adapter(config, lora_config, seed, PADDED_RANK)
    random = np.random.default_rng(seed)

    def fill(tree):
        if not isinstance(tree, dict):
            return tree
        if "lora_B" not in tree:
            return {name: fill(part) for name, part in tree.items()}
        used = np.any(np.asarray(tree["lora_A"]), axis=-2)[..., None]
        noise = random.normal(0, 0.1, tree["lora_B"].shape).astype(np.float32)
        return {"lora_A": tree["lora_A"], "lora_B": jnp.asarray(np.where(used, noise, np.float32(0)))}

    return adapter._replace(weights=fill(adapter.weights))


def with_connectors(adapter: Adapter, seed: int = 0) -> Adapter:
    """The adapter with random connectors in the place of those that do nothing yet, as after some training."""
    random = np.random.default_rng(seed)

    def draw(path, leaf):
        if path[-1].key not in ("phi", "bias"):
            return leaf
        return jnp.asarray(random.normal(0, 0.1 if path[-1].key == "phi" else 1, leaf.shape), jnp.float32)

    return adapter._replace(weights=jax.tree_util.tree_map_with_path(draw, adapter.weights))
