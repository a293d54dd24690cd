"""Attention of tokens to their own segment, or to what pages hold of theirs: the one entry, with kernels behind it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from skyrl.tx.layers.cached_attention import Pages, cached_attention
from skyrl.tx.layers.packed_attention import packed_attention


def attention(
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch tokens kv_heads key_dim"],
    value: Float[Array, "batch tokens kv_heads value_dim"],
    *,
    positions: Int[Array, "batch tokens"],
    segments: Int[Array, "batch tokens"],
    pages: Pages | None,
    scale: float,
    window: int | Int[Array, ""] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Array, "batch tokens heads value_dim"], Pages | None]:
    """Sums of values, and the pages with these tokens' keys and values. Head h reads key/value head h // group.

    Args:
        query: Rotated. If it is wider than keys (only with pages), its first part meets the values: they are the first
            part of keys, which is not stored twice.
        key: Likewise.
        value: Of any width.
        positions: Of tokens in their sequences, which is where pages hold them.
        segments: Sequences of a row, where there are no pages. Tokens of one are neighbours.
        pages: What earlier tokens left, and where these are stored before they are read.
        scale: Factor of the products of queries and keys.
        window: Tokens that a token attends to, itself included; None: all up to itself.
        softcap: Scores are softcap * tanh(scores / softcap), after scaling.
    """
    window = None if window is None else jnp.asarray(window, jnp.int32)
    if pages is None:
        return packed_attention(query, key, value, segments, scale=scale, window=window, softcap=softcap), None
    pages = pages.write(positions, key, value)
    return cached_attention(query, pages, positions, scale=scale, window=window, softcap=softcap), pages
