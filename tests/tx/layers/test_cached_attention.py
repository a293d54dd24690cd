"""Attention of rows of unlike length over a paged cache equals dense attention in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl.tx.layers.cached_attention import Pages, cached_attention

pytestmark = pytest.mark.gpu

ROWS, HEADS, KV_HEADS, WIDTH, SIZE, BLOCKS = 32, 4, 2, 16, 64, 20
SCALE = 0.3


def filled(lengths, keys, values):
    """Pages with the first `lengths` tokens of each row, in random places. All other entries are NaN."""
    table = np.random.default_rng(1).permutation(ROWS * BLOCKS).reshape(ROWS, BLOCKS)
    stored = np.full((ROWS * BLOCKS, KV_HEADS, WIDTH, SIZE), np.nan, np.float32)
    mixed = np.full((ROWS * BLOCKS, KV_HEADS, SIZE, WIDTH), np.nan, np.float32)
    for row, length in enumerate(lengths):
        for place in range(length):
            page, entry = table[row, place // SIZE], place % SIZE
            stored[page, :, :, entry], mixed[page, :, entry] = keys[row, place], values[row, place]
    return Pages(jnp.asarray(stored), jnp.asarray(mixed), jnp.asarray(table, jnp.int32))


def dense(query, keys, values, window, softcap):
    """Attention of one row, `[heads, width]`, float64."""
    keys, values = (
        np.repeat(x[-(window or len(x)) :], HEADS // KV_HEADS, axis=1).astype(float) for x in (keys, values)
    )
    scores = np.einsum("hd,shd->hs", query.astype(float), keys) * SCALE
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hs,shd->hd", weights / weights.sum(axis=1, keepdims=True), values)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (1, None), (None, 5.0)])
@pytest.mark.parametrize("kind", ["one long", "equal", "any"])
def test_rows_attend_to_their_own_tokens(kind, window, softcap, ordered):
    random = np.random.default_rng(0)
    lengths = {
        "one long": np.append(random.integers(1, 90, ROWS - 1), 1250),
        "equal": np.full(ROWS, 130),
        "any": random.integers(1, SIZE * BLOCKS + 1, ROWS),
    }[kind]
    lengths = -np.sort(-lengths) if ordered else lengths
    query = random.normal(size=(ROWS, 1, HEADS, WIDTH)).astype(np.float32)
    keys, values = random.normal(size=(2, ROWS, SIZE * BLOCKS, KV_HEADS, WIDTH)).astype(np.float32)
    limit = None if window is None else jnp.int32(window)
    attend = jax.jit(partial(cached_attention, scale=SCALE, window=limit, softcap=softcap, longest_first=True))
    found = attend(jnp.asarray(query), filled(lengths, keys, values), jnp.asarray(lengths[:, None] - 1, jnp.int32))
    for row, length in enumerate(lengths):
        expected = dense(query[row, 0], keys[row, :length], values[row, :length], window, softcap)
        np.testing.assert_allclose(found[row, 0], expected, atol=1e-5)
