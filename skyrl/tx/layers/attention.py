"""Attention of packed segments, or over a paged cache. The only entry point to all kernels."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from skyrl.tx.layers.cached_attention import Pages, cached_attention
from skyrl.tx.layers.devices import platform
from skyrl.tx.layers.packed_attention import packed_attention
from skyrl.tx.layers.splash_attention import splash_attention, suits


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
    windows: Sequence[int] = (),
    softcap: float | None = None,
    longest_first: bool = False,
) -> tuple[Float[Array, "batch tokens heads value_dim"], Pages | None]:
    """Return (attention output, updated pages). Query head h uses key/value head h // group.

    Args:
        query: Rotated queries. With pages, queries may be wider than `key`. A whole key is then the value followed by
            `key`, and the value is stored only once.
        key: Rotated keys.
        value: Values, of any width.
        positions: Positions of the tokens in their sequences, and in the pages.
        segments: Segment id of each token, if there are no pages. The tokens of a segment are contiguous.
        pages: Cache of earlier tokens. The new tokens are written to it first. None: attention within segments.
        scale: Factor of the products of queries and keys.
        window: Number of tokens that a token attends to, including itself; None: itself and all before it.
        windows: All possible values of `window`, if it is an array.
        softcap: If set, scores are softcap * tanh(scores / softcap), after scaling.
        longest_first: True if rows with higher positions precede others. Pages of long rows are then read by themselves
            (about, see `cached_attention`). The order matters only for speed.
    """
    if platform() == "tpu":  # the kernel takes scaled queries; the sampler, too, so that both round alike
        query, scale = (query.astype(jnp.float32) * scale).astype(query.dtype), 1.0
        if pages is None and suits(query, key, value):
            options = {"window": window, "windows": windows, "softcap": softcap}
            return splash_attention(query, key, value, segments, **options), None
    window = None if window is None else jnp.asarray(window, jnp.int32)
    if pages is None:
        return packed_attention(query, key, value, segments, scale=scale, window=window, softcap=softcap), None
    pages = pages.write(positions, key, value)
    options = {"scale": scale, "window": window, "softcap": softcap, "longest_first": longest_first}
    return cached_attention(query, pages, positions, **options), pages
