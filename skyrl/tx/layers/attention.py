"""Causal attention with grouped key/value heads: within packed segments, or of new tokens over a cache.

Scores and softmax are float32 whatever the dtype of the inputs. A token always attends to itself, so no row is empty
and padding stays finite.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30
"""Score of a pair that may not attend; its weight underflows to exactly 0."""


def packed_mask(tokens: int, segment_ids: Int[Array, "batch tokens"] | None) -> Bool[Array, "_ tokens tokens"]:
    """Which key (last axis) each query may see: earlier ones, itself, and of its own segment only."""
    causal = jnp.tril(jnp.ones((1, tokens, tokens), bool))
    return causal if segment_ids is None else causal & (segment_ids[:, :, None] == segment_ids[:, None, :])


def packed_attention(
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch tokens kv_heads head_dim"],
    value: Float[Array, "batch tokens kv_heads head_dim"],
    mask: Bool[Array, "_ tokens tokens"],
) -> Float[Array, "batch tokens heads head_dim"]:
    """Attention of a whole sequence to itself."""
    scores = jnp.where(mask[:, None, None], _scores(query, key), MASKED)
    return _mix(jax.nn.softmax(scores, axis=-1), value).reshape(query.shape).astype(query.dtype)


def cached_attention(
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch tokens kv_heads head_dim"],
    value: Float[Array, "batch tokens kv_heads head_dim"],
    cached_keys: Float[Array, "batch capacity kv_heads head_dim"],
    cached_values: Float[Array, "batch capacity kv_heads head_dim"],
    start: Int[Array, "batch"],
    mask: Bool[Array, "_ tokens tokens"],
) -> Float[Array, "batch tokens heads head_dim"]:
    """Attention of new tokens to the first `start` entries of the cache and, where `mask` says so, to each other.

    The rest of the cache may hold anything, even NaN of an earlier tenant: it is masked out of scores and values.
    """
    past = jnp.arange(cached_keys.shape[1])[None, :] < start[:, None]
    old = jnp.where(past[:, None, None, None, :], _scores(query, cached_keys), MASKED)
    new = jnp.where(mask[:, None, None], _scores(query, key), MASKED)
    highest = jnp.maximum(old.max(axis=-1, keepdims=True), new.max(axis=-1, keepdims=True))
    old, new = jnp.exp(old - highest), jnp.exp(new - highest)
    total = old.sum(axis=-1, keepdims=True) + new.sum(axis=-1, keepdims=True)
    cached_values = jnp.where(past[:, :, None, None], cached_values, jnp.zeros((), cached_values.dtype))
    mixed = _mix(old / total, cached_values) + _mix(new / total, value)
    return mixed.reshape(query.shape).astype(query.dtype)


def _scores(
    query: Float[Array, "batch tokens heads head_dim"], key: Float[Array, "batch others kv_heads head_dim"]
) -> Float[Array, "batch kv_heads group tokens others"]:
    """float32 scaled dot products. Head h reads key/value head h // group."""
    batch, tokens, heads, head_dim = query.shape
    grouped = query.reshape(batch, tokens, key.shape[2], heads // key.shape[2], head_dim)
    return jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32) * head_dim**-0.5


def _mix(
    weights: Float[Array, "batch kv_heads group tokens others"], value: Float[Array, "batch others kv_heads head_dim"]
) -> Float[Array, "batch tokens kv_heads group head_dim"]:
    """float32 sums of values, with weights rounded to the dtype of the values."""
    weights = weights.astype(value.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value, preferred_element_type=jnp.float32)
