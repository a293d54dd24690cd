"""Products of rows with the matrix of each row's group: those of experts, and of experts' adapters.

Rows are sorted by group and cut into blocks of one group each, the last of a group filled up, so a product is a loop
over blocks that reads one matrix at a time: work and memory grow with the rows, not with rows times groups.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LARGEST_BLOCK = 64
"""Rows of a block at most: fewer leave less empty at the ends of groups, more are faster products."""

Tokens = Float[Array, "tokens in"]
Rows = Float[Array, "rows in"]
Source = Int[Array, "blocks size"]
Place = Int[Array, "rows"]
Blocks = Float[Array, "blocks size in"]
Products = Float[Array, "blocks size out"]
Matrices = Float[Array, "groups in out"]
Group = Int[Array, "blocks"]


class Grouping(NamedTuple):
    """Places of rows in blocks. A pytree."""

    source: Source
    """Row in each place, the number of rows where there is none."""
    place: Place
    """Place of each row, counted over all blocks."""
    group: Group
    """Group of the rows of each block."""

    def gather(self, tokens: Tokens, each: int) -> Blocks:
        """Rows in their places, zeros elsewhere. Row i of the grouping is that of token i // each."""
        return _gathered(each, tokens, self.source, self.place)

    def scatter(self, blocks: Blocks) -> Rows:
        """The inverse, for `each` = 1."""
        return _scattered(blocks, self.source, self.place)


# A gradient of either is read where the other would read it: XLA adds one row after another on a CPU.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(each: int, tokens: Tokens, source: Source, place: Place) -> Blocks:
    token = jnp.where(source < place.shape[0], source // each, tokens.shape[0])
    return tokens.at[token].get(mode="fill", fill_value=0)


def _gathered_backward(each: int, place: Place, gradient: Blocks) -> tuple[Tokens, None, None]:
    of_rows = gradient.reshape(-1, gradient.shape[-1])[place]
    return of_rows.reshape(-1, each, gradient.shape[-1]).sum(axis=1), None, None


_gathered.defvjp(
    lambda each, tokens, source, place: (_gathered(each, tokens, source, place), place), _gathered_backward
)


@jax.custom_vjp
def _scattered(blocks: Blocks, source: Source, place: Place) -> Rows:
    return blocks.reshape(-1, blocks.shape[-1])[place]


def _scattered_backward(source: Source, gradient: Rows) -> tuple[Blocks, None, None]:
    return gradient.at[source].get(mode="fill", fill_value=0), None, None


_scattered.defvjp(lambda blocks, source, place: (_scattered(blocks, source, place), source), _scattered_backward)


def grouped(groups: Int[Array, "rows"], count: int) -> Grouping:
    """A grouping of rows whose groups are given, all below `count`."""
    rows = groups.shape[0]
    size = 1
    while 2 * size <= min(LARGEST_BLOCK, rows // count):
        size *= 2
    most = (rows - min(rows, count)) // size + min(rows, count)
    order = jnp.argsort(groups, stable=True)
    sizes = jnp.zeros(count, jnp.int32).at[groups].add(1)
    blocks = (sizes + size - 1) // size
    last_block, last_row = jnp.cumsum(blocks), jnp.cumsum(sizes)
    in_order = groups[order]
    within = jnp.arange(rows, dtype=jnp.int32) - (last_row - sizes)[in_order]
    sorted_place = (last_block - blocks)[in_order] * size + within
    place = jnp.zeros(rows, jnp.int32).at[order].set(sorted_place)
    source = jnp.full(most * size, rows, jnp.int32).at[sorted_place].set(order.astype(jnp.int32))
    group = jnp.searchsorted(last_block, jnp.arange(most, dtype=jnp.int32), side="right")
    return Grouping(source.reshape(most, size), place, jnp.minimum(group, count - 1).astype(jnp.int32))


@jax.custom_vjp
def grouped_product(blocks: Blocks, matrices: Matrices, group: Group) -> Products:
    """Each block times the matrix of its group, of which there may be more than groups that have rows."""
    return _forward(blocks, matrices, group)[0]


def _forward(blocks: Blocks, matrices: Matrices, group: Group) -> tuple[Products, tuple[Blocks, Matrices, Group]]:
    def product(inputs: tuple[Array, Array]) -> Array:
        block, index = inputs
        return block @ jax.lax.dynamic_index_in_dim(matrices, index, keepdims=False)

    return jax.lax.map(product, (blocks, group)), (blocks, matrices, group)


def _backward(saved: tuple[Blocks, Matrices, Group], gradient: Products) -> tuple[Blocks, Matrices, None]:
    """A block's gradient, and the sum over a group's blocks of outer products, added to in place."""
    blocks, matrices, group = saved

    def of_block(inputs: tuple[Array, Array]) -> Array:
        gradient, index = inputs
        return gradient @ jax.lax.dynamic_index_in_dim(matrices, index, keepdims=False).T

    def add(total: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, None]:
        block, gradient, index = inputs
        return total.at[index].add((block.T @ gradient).astype(total.dtype)), None

    total = jnp.zeros(matrices.shape, jnp.float32)
    of_matrices, _ = jax.lax.scan(add, total, (blocks, gradient, group))
    return jax.lax.map(of_block, (gradient, group)), of_matrices.astype(matrices.dtype), None


grouped_product.defvjp(_forward, _backward)
