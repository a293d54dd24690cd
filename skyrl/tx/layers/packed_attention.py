"""Causal self-attention of packed sequences, with a custom backward pass.

Scores are computed for one stripe (range of queries) at a time, against the keys up to the end of the stripe. The
backward pass recomputes them, so memory grows with the number of tokens, not with its square (Dao et al. 2022,
https://arxiv.org/abs/2205.14135).
Scores and softmax are float32 whatever the dtype of the inputs. A token always attends to itself, so no row is empty
and padding stays finite.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30
"""Score of a masked pair; its weight underflows to exactly 0."""

STRIPES = 4
"""Number of stripes into which the queries of a long sequence are divided. Keys after the end of a stripe are
skipped."""

NARROWEST_STRIPE = 128
"""Minimum number of queries of a stripe: smaller products are slow."""

SCORES_AT_ONCE = 2**22
"""Approximate number of scores (all heads and rows) computed at once. Larger stripes are computed in steps."""


def packed_attention(
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch tokens kv_heads head_dim"],
    value: Float[Array, "batch tokens kv_heads value_dim"],
    segment_ids: Int[Array, "batch tokens"],
    *,
    scale: float,
    window: Int[Array, ""] | None = None,
    softcap: float | None = None,
) -> Float[Array, "batch tokens heads value_dim"]:
    """Compute attention of each token to itself and earlier tokens of its segment. Head h uses key/value head
    h // group.

    `scale`, `window` and `softcap` are as in `skyrl.tx.layers.attention`.
    """
    batch, tokens, heads, head_dim = query.shape
    grouped = query.reshape(batch, tokens, key.shape[2], heads // key.shape[2], head_dim)
    arrays = jnp.moveaxis(grouped, 1, 3), jnp.moveaxis(key, 1, 2), jnp.moveaxis(value, 1, 2)
    mixed: Mixed = _attention(scale, softcap, *arrays, segment_ids, window)  # pyright: ignore[reportAssignmentType]
    return jnp.moveaxis(mixed, 3, 1).reshape(*query.shape[:3], value.shape[3]).astype(query.dtype)


Queries = Float[Array, "batch kv_heads group queries head_dim"]
Mixed = Float[Array, "batch kv_heads group queries value_dim"]
Keys = Float[Array, "batch kv_heads keys head_dim"]
Values = Float[Array, "batch kv_heads keys value_dim"]
PerQuery = Float[Array, "batch kv_heads group queries 1"]
Scores = Float[Array, "batch kv_heads group queries keys"]
Segments = Int[Array, "batch tokens"]
Window = Int[Array, ""] | None
Saved = tuple[Queries, Keys, Values, Segments, Any, Mixed, PerQuery]
"""Residuals of the forward pass. The window is a JAX array, or a NumPy array if it is constant."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    scale: float, softcap: float | None, query: Queries, key: Keys, value: Values, segments: Segments, window: Window
) -> Mixed:
    return _forward(scale, softcap, query, key, value, segments, window)[0]


def _forward(
    scale: float, softcap: float | None, query: Queries, key: Keys, value: Values, segments: Segments, window: Window
) -> tuple[Mixed, Saved]:
    """Return the float32 output, and the inputs of the backward pass, which include log-sum-exps of the scores."""

    def stripe(start: Array | int, query: Queries, keys: int) -> tuple[Mixed, PerQuery]:
        visible = _visible(segments, window, start, query.shape[3], keys)
        scores = jnp.where(visible, _scores(query, key[:, :, :keys], scale, softcap), MASKED)
        highest = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - highest)
        total = weights.sum(axis=-1, keepdims=True)
        mixed = jnp.einsum(
            "bkgts,bksd->bkgtd",
            weights,  # not rounded to the values' dtype, as in the sampler, so that ratios of fresh samples are 1
            value[:, :, :keys].astype(jnp.float32),
        )
        return mixed / total, highest + jnp.log(total)

    parts = [_in_steps(stripe, start, end, query) for start, end in _stripes(query.shape[3])]
    mixed, normaliser = (jnp.concatenate(leaves, axis=3) for leaves in zip(*parts, strict=True))
    return mixed, (query, key, value, segments, window, mixed, normaliser)


def _backward(
    scale: float, softcap: float | None, saved: Saved, gradient: Mixed
) -> tuple[Queries, Keys, Values, None, None]:
    """Compute the gradients of query, key and value, with float32 products and recomputed weights."""
    query, key, value, segments, window, mixed, normaliser = saved
    window = None if window is None else jnp.asarray(window)
    gradient = gradient.astype(jnp.float32)
    share = jnp.sum(gradient * mixed, axis=-1, keepdims=True)

    def stripe(
        start: Array | int, query: Queries, gradient: Mixed, normaliser: PerQuery, share: PerQuery, keys: int
    ) -> tuple[Queries, Keys, Values]:
        seen, read = key[:, :, :keys], value[:, :, :keys].astype(jnp.float32)
        visible, scores = _visible(segments, window, start, query.shape[3], keys), _scores(query, seen, scale, softcap)
        weights = jnp.exp(jnp.where(visible, scores, MASKED) - normaliser)
        of_weights = jnp.einsum("bkgtd,bksd->bkgts", gradient, read)
        of_scores = weights * (of_weights - share) * scale
        if softcap is not None:
            of_scores *= 1 - (scores / softcap) ** 2
        return (
            jnp.einsum("bkgts,bksd->bkgtd", of_scores, seen.astype(jnp.float32)),
            jnp.einsum("bkgts,bkgtd->bksd", of_scores, query.astype(jnp.float32)),
            jnp.einsum("bkgts,bkgtd->bksd", weights, gradient),
        )

    of_query, of_key, of_value = [], jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    for start, end in _stripes(query.shape[3]):
        part, keys, values = _in_steps(stripe, start, end, query, gradient, normaliser, share, summed=2)
        of_query.append(part)
        of_key, of_value = of_key.at[:, :, :end].add(keys), of_value.at[:, :, :end].add(values)
    return (
        jnp.concatenate(of_query, axis=3).astype(query.dtype),
        of_key.astype(key.dtype),
        of_value.astype(value.dtype),
        None,
        None,
    )


_attention.defvjp(_forward, _backward)


def _stripes(tokens: int) -> list[tuple[int, int]]:
    """Return (start, end) of each stripe."""
    count = min(STRIPES, tokens // NARROWEST_STRIPE)
    width = tokens // count if count and tokens % count == 0 else tokens
    return [(start, start + width) for start in range(0, tokens, width)]


def _in_steps(stripe: Callable[..., Any], start: int, end: int, *arrays: Array, summed: int = 0) -> Any:
    """Run `stripe` for the queries from `start` to `end`, in equal steps of about `SCORES_AT_ONCE` scores.

    Axis 3 of `arrays` and of the results is the query, except for the last `summed` results, which are sums over
    queries.
    """
    width, scores = end - start, arrays[0].size // arrays[0].shape[3] // arrays[0].shape[4] * (end - start) * end
    steps = 1
    while scores > steps * SCORES_AT_ONCE and width % (2 * steps) == 0:
        steps *= 2
    own = [array[:, :, :, start:end] for array in arrays]
    if steps == 1:
        return stripe(start, *own, keys=end)
    cut = [jnp.moveaxis(array.reshape(*array.shape[:3], steps, -1, array.shape[4]), 3, 0) for array in own]

    def step(sums: tuple[Array, ...], inputs: Any) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        index, own = inputs
        results = stripe(start + index * (width // steps), *own, keys=end)
        kept = results[: len(results) - summed]
        return tuple(map(jnp.add, sums, results[len(kept) :])), kept

    shapes = jax.eval_shape(lambda own: stripe(start, *own, keys=end), [array[0] for array in cut])
    zeros = tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes[len(shapes) - summed :])
    sums, kept = jax.lax.scan(step, zeros, (jnp.arange(steps), cut))
    joined = (jnp.moveaxis(leaf, 0, 3).reshape(*leaf.shape[1:4], width, leaf.shape[5]) for leaf in kept)
    return (*joined, *sums)


def _visible(
    segments: Segments, window: Window, start: Array | int, queries: int, keys: int
) -> Bool[Array, "batch 1 1 queries keys"]:
    """Return, for each query from `start` on, the mask of the keys that it attends to among the first `keys`."""
    places = start + jnp.arange(queries)
    own = jax.lax.dynamic_slice_in_dim(segments, start, queries, axis=1)
    causal = places[None, :, None] >= jnp.arange(keys)[None, None, :]
    if window is not None:
        causal &= places[None, :, None] - jnp.arange(keys)[None, None, :] < window
    return (causal & (own[:, :, None] == segments[:, None, :keys]))[:, None, None]


def _scores(query: Queries, key: Keys, scale: float, softcap: float | None) -> Scores:
    """Compute float32 scores: scaled products, with the softcap if there is one."""
    products = jnp.einsum("bkgtd,bksd->bkgts", query, key, preferred_element_type=jnp.float32) * scale
    return products if softcap is None else softcap * jnp.tanh(products / softcap)
