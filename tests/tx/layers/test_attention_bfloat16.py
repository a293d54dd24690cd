"""Attention over bfloat16 inputs: training, reading prompts and decoding round their results and nothing before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl.tx.layers.cached_attention import Pages, cached_attention
from skyrl.tx.layers.packed_attention import packed_attention

pytestmark = pytest.mark.gpu

TOKENS, HEADS, KV_HEADS, WIDTH, PAGE = 256, 8, 2, 64, 64
SCALE = WIDTH**-0.5


@pytest.fixture(scope="module")
def inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value of one sequence; scores are large enough for weights of every size."""
    draws = np.random.default_rng(0)
    shapes = [(1, TOKENS, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return tuple(jnp.asarray(draws.normal(0, 1.5, shape), jnp.bfloat16) for shape in shapes)


@pytest.fixture(scope="module")
def exact(inputs) -> np.ndarray:
    """The same in NumPy float64, `[tokens, heads, width]`."""
    query, key, value = (np.asarray(part[0], np.float64) for part in inputs)
    key, value = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (key, value))
    scores = np.einsum("thd,shd->hts", query, key) * WIDTH**-0.5
    scores = np.where(np.tri(TOKENS, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), value)


def pages(key: jax.Array, value: jax.Array) -> Pages:
    """A cache with the whole sequence."""
    count = TOKENS // PAGE
    empty = (
        jnp.zeros((count, KV_HEADS, WIDTH, PAGE), jnp.bfloat16),
        jnp.zeros((count, KV_HEADS, PAGE, WIDTH), jnp.bfloat16),
    )
    table = jnp.arange(count, dtype=jnp.int32)[None]
    return Pages(*empty, table).write(jnp.arange(TOKENS, dtype=jnp.int32)[None], key, value)


def trained(query, key, value):
    return packed_attention(query, key, value, jnp.zeros((1, TOKENS), jnp.int32), scale=SCALE)


def read(query, key, value):
    return cached_attention(query, pages(key, value), jnp.arange(TOKENS, dtype=jnp.int32)[None], scale=SCALE)


def decoded(query, key, value):
    """Each token by itself, all rows over the same pages."""
    cache = pages(key, value)
    rows = cache._replace(table=jnp.broadcast_to(cache.table, (TOKENS, cache.table.shape[1])))
    positions = jnp.arange(TOKENS, dtype=jnp.int32)[:, None]
    return jnp.moveaxis(cached_attention(query[0][:, None], rows, positions, scale=SCALE), 1, 0)


@pytest.mark.parametrize("way", [trained, read, decoded])
def test_attention_over_bfloat16_is_that_of_float64_rounded_once(inputs, exact, way):
    ours = np.asarray(jax.jit(way)(*inputs)[0])
    assert ours.dtype == jnp.bfloat16
    rounded = exact.astype(jnp.bfloat16)
    # Sums in float32 may cross the middle of two numbers; weights in bfloat16 move every third result.
    assert (ours == rounded).mean() > 0.99
