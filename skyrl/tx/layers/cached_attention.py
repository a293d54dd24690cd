"""Causal grouped-query attention of new tokens over a paged cache.

Scores and softmax are float32 whatever the dtype of the inputs. A token always attends to itself, so no row is empty
and padding stays finite.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from skyrl.tx.layers.packed_attention import MASKED

PAGES_AT_ONCE = 4
"""Number of pages processed at once if a row has several new tokens."""

FEWER_ROWS = 4
"""Factor between the numbers of rows of two loops over pages."""


Carry = tuple[Array, Array, Array]
"""Highest score, sum of weights, and weighted sum of values so far, of each row, head and token."""


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
    longest_first: bool = False,
) -> Float[Array, "batch tokens heads value_dim"]:
    """Compute attention of tokens to all tokens in `pages` up to their own positions, block by block.

    Queries wider than keys, `scale`, `window`, `softcap` and `longest_first` are as in `skyrl.tx.layers.attention`.
    Only visible blocks are read, with an online softmax (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867).
    Unused entries of pages may have any content, even NaN of an earlier tenant: they are masked out of scores and
    values.
    """
    batch, tokens, heads, head_dim = query.shape
    kv_heads, width = pages.keys.shape[1], pages.values.shape[3]
    grouped = query.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    shared = head_dim > pages.keys.shape[2]  # values are the first part of keys
    attend, span = (_attend_one, 1) if tokens == 1 and not shared else (_attend_many, PAGES_AT_ONCE)
    attend = partial(attend, partial(_scaled, scale, softcap))

    def block(index: Array, carry: Carry, first: Array | int, rows: int, span: int) -> Carry:
        number = first + index * span + jnp.arange(span, dtype=jnp.int32)
        page = jnp.take(pages.table[:rows], number, axis=1, mode="clip")
        place = (number[:, None] * pages.size + jnp.arange(pages.size, dtype=jnp.int32)[None]).reshape(-1)
        # Padding of a prompt may be past the end of the table, where pages belong to other rows.
        inside = place < pages.table.shape[1] * pages.size
        stored = (place[None, None] <= positions[:rows, :, None]) & inside[None, None]
        if window is not None:
            stored &= place[None, None] > positions[:rows, :, None] - window
        return attend(grouped[:rows], pages, page, stored, *carry)

    shape = batch, kv_heads, heads // kv_heads, tokens
    carry: Carry = jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, width))
    begin: Array | int = 0
    ended = []
    for rows, at_once, left in _loops(batch, span, longest_first):
        if window is not None:
            begin = jnp.maximum(begin, (positions[:rows].min() - window + 1) // pages.size)
        end = jnp.minimum(positions[left:rows].max() // pages.size + 1, pages.table.shape[1])
        count = jnp.maximum(-((begin - end) // at_once), 0)
        carry = jax.lax.fori_loop(0, count, partial(block, first=begin, rows=rows, span=at_once), carry)
        begin += count * at_once
        highest, total, mixed = carry
        ended.insert(0, (total[left:], mixed[left:]))
        carry = highest[:left], total[:left], mixed[:left]
    total, mixed = (jnp.concatenate(parts) for parts in zip(*ended, strict=True))
    if window is not None:  # a row past the end of the table has no stored tokens
        total = jnp.where(total == 0, 1.0, total)
    return jnp.moveaxis(mixed / total[..., None], 3, 1).reshape(*query.shape[:3], width).astype(query.dtype)


def _loops(rows: int, span: int, longest_first: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (rows, pages read at once, rows of the following loop) of the loops over pages.

    A loop reads pages until only the rows of the following loop have more. The last loops have few rows and read more
    pages at once.
    """
    while longest_first and rows >= FEWER_ROWS:
        yield rows, span, rows // FEWER_ROWS
        rows, span = rows // FEWER_ROWS, span * 2
    yield rows, span, 0


def _scaled(scale: float, softcap: float | None, products: Array) -> Array:
    products *= scale
    return products if softcap is None else softcap * jnp.tanh(products / softcap)


def _attend_one(
    scaled: Callable[[Array], Array],
    query: Float[Array, "batch 1 kv_heads group head_dim"],
    pages: Pages,
    page: Int[Array, "batch span"],
    stored: Bool[Array, "batch 1 stored"],
    highest: Float[Array, "batch kv_heads group 1"],
    total: Float[Array, "batch kv_heads group 1"],
    mixed: Float[Array, "batch kv_heads group 1 value_dim"],
) -> tuple[Array, Array, Array]:
    """Add several pages, for one token per row.

    The products are memory-bound. Written as sums of element-wise products, they read pages without copying them.
    """
    rows, span = page.shape

    def of_pages(x: Array) -> Array:
        return jnp.repeat(x, span, axis=0)

    def of_rows(reduce: Callable[..., Array], x: Array) -> Array:
        return reduce(x.reshape(rows, span, *x.shape[1:]), axis=1)

    key, value = (part[page.reshape(-1)][:, :, None].astype(jnp.float32) for part in (pages.keys, pages.values))
    stored = stored.reshape(rows * span, 1, -1)
    scores = jnp.sum(of_pages(query[:, 0, :, :, :, None].astype(jnp.float32)) * key, axis=-2)
    scores = jnp.where(stored[:, None], scaled(scores), MASKED)
    peak = jnp.maximum(highest, of_rows(jnp.max, scores.max(axis=-1, keepdims=True)))
    weights, kept = jnp.where(stored[:, None], jnp.exp(scores - of_pages(peak)), 0.0), jnp.exp(highest - peak)
    value = jnp.where(stored[:, None, :, :, None], value, 0)
    added = of_rows(jnp.sum, jnp.sum(weights[..., None] * value, axis=-2, keepdims=True))
    total = total * kept + of_rows(jnp.sum, weights.sum(axis=-1, keepdims=True))
    return peak, total, mixed * kept[..., None] + added


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
