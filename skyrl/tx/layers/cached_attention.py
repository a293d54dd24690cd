"""Causal grouped-query attention of new tokens over a paged cache.

Scores and softmax are float32 whatever the dtype of the inputs. A token always attends to itself, so no row is empty
and padding stays finite.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from skyrl.tx.layers.packed_attention import MASKED

PAGES_AT_ONCE = 4
"""Number of pages processed at once if a row has several new tokens."""


class Pages(NamedTuple):
    """One layer's part of a `KVCache`. A pytree."""

    keys: Float[Array, "pages kv_heads key_dim page_size"]
    values: Float[Array, "pages kv_heads page_size value_dim"]
    table: Int[Array, "batch blocks"]

    @property
    def size(self) -> int:
        """Number of tokens per page."""
        return self.keys.shape[-1]

    def of_layer(self, layer: int | Array, layers: int) -> "Pages":
        """Return the part of one layer, if the arrays contain the pages of `layers` layers, one layer after another."""
        return self._replace(table=self.table + layer * (len(self.keys) // layers))

    def with_arrays_of(self, other: "Pages") -> "Pages":
        """Return this layer's part with the updated arrays of `other`."""
        return other._replace(table=self.table)

    def write(
        self,
        positions: Int[Array, "batch tokens"],
        key: Float[Array, "batch tokens kv_heads key_dim"],
        value: Float[Array, "batch tokens kv_heads value_dim"],
    ) -> "Pages":
        """Store tokens at their positions. Tokens past the end of the table are dropped."""
        block = positions // self.size
        inside = block < self.table.shape[1]
        page = jnp.take_along_axis(self.table, jnp.where(inside, block, 0), axis=1)
        page, entry = jnp.where(inside, page, self.keys.shape[0]), positions % self.size
        return self._replace(
            keys=self.keys.at[page, :, :, entry].set(key, mode="drop"),
            values=self.values.at[page, :, entry].set(value, mode="drop"),
        )


def cached_attention(
    query: Float[Array, "batch tokens heads head_dim"],
    pages: Pages,
    positions: Int[Array, "batch tokens"],
    *,
    scale: float,
    window: Int[Array, ""] | None = None,
    softcap: float | None = None,
) -> Float[Array, "batch tokens heads value_dim"]:
    """Compute attention of tokens to all tokens in `pages` up to their own positions, block by block.

    Queries wider than keys, `scale`, `window` and `softcap` are as in `skyrl.tx.layers.attention`. Only visible blocks
    are read, with an online softmax (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867). Unused entries of
    pages may have any content, even NaN of an earlier tenant: they are masked out of scores and values.
    """
    batch, tokens, heads, head_dim = query.shape
    kv_heads, width = pages.keys.shape[1], pages.values.shape[3]
    grouped = query.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    shared = head_dim > pages.keys.shape[2]  # values are the first part of keys
    attend, span = (_attend_one, 1) if tokens == 1 and not shared else (_attend_many, PAGES_AT_ONCE)
    attend = partial(attend, partial(_scaled, scale, softcap))
    table = jnp.pad(pages.table, ((0, 0), (0, -pages.table.shape[1] % span)))

    def block(index: Array | int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, mixed = carry
        page = jax.lax.dynamic_slice_in_dim(table, index * span, span, axis=1)
        place = index * span * pages.size + jnp.arange(span * pages.size, dtype=jnp.int32)
        # Padding of a prompt may be past the end of the table, where pages belong to other rows.
        stored = (place[None, None] <= positions[:, :, None]) & (place < pages.table.shape[1] * pages.size)[None, None]
        if window is not None:
            stored &= place[None, None] > positions[:, :, None] - window
        return attend(grouped, pages, page, stored, highest, total, mixed)

    shape = batch, kv_heads, heads // kv_heads, tokens
    start = jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, width))
    blocks = jnp.minimum(positions.max() // (span * pages.size) + 1, table.shape[1] // span)
    first = 0 if window is None else jnp.maximum(positions.min() - window + 1, 0) // (span * pages.size)
    _, total, mixed = jax.lax.fori_loop(first, blocks, block, start)
    if window is not None:  # a row past the end of the table has no stored tokens
        total = jnp.where(total == 0, 1.0, total)
    return jnp.moveaxis(mixed / total[..., None], 3, 1).reshape(*query.shape[:3], width).astype(query.dtype)


def _scaled(scale: float, softcap: float | None, products: Array) -> Array:
    products *= scale
    return products if softcap is None else softcap * jnp.tanh(products / softcap)


def _attend_one(
    scaled: Callable[[Array], Array],
    query: Float[Array, "batch 1 kv_heads group head_dim"],
    pages: Pages,
    page: Int[Array, "batch 1"],
    stored: Bool[Array, "batch 1 page_size"],
    highest: Float[Array, "batch kv_heads group 1"],
    total: Float[Array, "batch kv_heads group 1"],
    mixed: Float[Array, "batch kv_heads group 1 value_dim"],
) -> tuple[Array, Array, Array]:
    """Add one page, for one token per row.

    The products are memory-bound. Written as sums of element-wise products, they read pages without copying them.
    """
    key, value = (part[page[:, 0]][:, :, None].astype(jnp.float32) for part in (pages.keys, pages.values))
    scores = jnp.sum(query[:, 0, :, :, :, None].astype(jnp.float32) * key, axis=-2)
    scores = jnp.where(stored[:, None], scaled(scores), MASKED)
    peak = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
    weights, kept = jnp.where(stored[:, None], jnp.exp(scores - peak), 0.0), jnp.exp(highest - peak)
    value = jnp.where(stored[:, None, :, :, None], value, 0)
    added = jnp.sum(weights[..., None] * value, axis=-2, keepdims=True)
    return peak, total * kept + weights.sum(axis=-1, keepdims=True), mixed * kept[..., None] + added


def _attend_many(
    scaled: Callable[[Array], Array],
    query: Float[Array, "batch tokens kv_heads group head_dim"],
    pages: Pages,
    page: Int[Array, "batch span"],
    stored: Bool[Array, "batch tokens stored"],
    highest: Float[Array, "batch kv_heads group tokens"],
    total: Float[Array, "batch kv_heads group tokens"],
    mixed: Float[Array, "batch kv_heads group tokens value_dim"],
) -> tuple[Array, Array, Array]:
    """Add several pages, for several tokens per row."""
    batch, span = page.shape
    key = jnp.moveaxis(pages.keys[page], 1, 3).reshape(batch, *pages.keys.shape[1:3], span * pages.size)
    value = jnp.moveaxis(pages.values[page], 1, 2).reshape(batch, key.shape[1], -1, pages.values.shape[3])
    if query.shape[-1] > key.shape[2]:
        key = jnp.concatenate([jnp.swapaxes(value, 2, 3), key], axis=2).astype(query.dtype)
    value = jnp.where(stored.any(axis=1)[:, None, :, None], value.astype(jnp.float32), 0)
    scores = jnp.einsum("btkgh,bkhs->bkgts", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(stored[:, None, None], scaled(scores), MASKED)
    peak = jnp.maximum(highest, scores.max(axis=-1))
    weights, kept = jnp.where(stored[:, None, None], jnp.exp(scores - peak[..., None]), 0.0), jnp.exp(highest - peak)
    added = jnp.einsum("bkgts,bksh->bkgth", weights, value)
    return peak, total * kept + weights.sum(axis=-1), mixed * kept[..., None] + added
