"""Grouped matrix products: each row is multiplied by the matrix of its group. Used for experts and their adapters.

Rows are sorted by group and divided into blocks of one group each; the last block of a group is padded. A product is a
loop over blocks with one matrix each, so work and memory grow with the number of rows, not with rows times groups.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LARGEST_BLOCK = 64
"""Maximum rows of a block. Smaller blocks need less padding at the ends of groups; larger products are faster."""

Tokens = Float[Array, "tokens in"]
Rows = Float[Array, "rows in"]
Source = Int[Array, "blocks size"]
Place = Int[Array, "rows"]
Blocks = Float[Array, "blocks size in"]
Products = Float[Array, "blocks size out"]
Matrices = Float[Array, "groups in out"]
Group = Int[Array, "blocks"]


class Grouping(NamedTuple):
    """Assignment of rows to positions in blocks. A pytree."""

    source: Source
    """Row at each position. Padding has the total number of rows."""
    place: Place
    """Position of each row, counted over all blocks."""
    group: Group
    """Group of each block."""

    def gather(self, tokens: Tokens, each: int) -> Blocks:
        """Arrange rows in blocks, with zeros as padding. Row i of the grouping is token i // each."""
        return _gathered(each, tokens, self.source, self.place)

    def scatter(self, blocks: Blocks) -> Rows:
        """Return rows in their original order: the inverse of `gather` with `each` = 1."""
        return _scattered(blocks, self.source, self.place)


# The gradient of each is a gather, too, because XLA's scatter-add on a CPU adds one row at a time.


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
    """Assign rows to blocks by their groups, which are all below `count`."""
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


def grouped_product(blocks: Blocks, matrices: Matrices, group: Group, incomplete: bool = False) -> Products:
    """Multiply each block by the matrix of its group. Groups may be empty.

    If `incomplete`, groups from `len(matrices)` on have no matrix: their blocks are skipped, and give zeros.
    """
    products: Products = _product(blocks, matrices, group, incomplete)  # pyright: ignore[reportAssignmentType]
    return products


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(blocks: Blocks, matrices: Matrices, group: Group, incomplete: bool) -> Products:
    return _forward(blocks, matrices, group, incomplete)[0]


def _forward(
    blocks: Blocks, matrices: Matrices, group: Group, incomplete: bool
) -> tuple[Products, tuple[Blocks, Matrices, Group]]:
    def product(block: Array, index: Array) -> Array:
        return block @ jax.lax.dynamic_index_in_dim(matrices, index, keepdims=False)

    return _over_blocks(product, blocks, group, len(matrices) if incomplete else None), (blocks, matrices, group)


def _backward(
    incomplete: bool, saved: tuple[Blocks, Matrices, Group], gradient: Products
) -> tuple[Blocks, Matrices, None]:
    """Compute the gradients of blocks and matrices. A matrix's gradient is summed in place over its group's blocks."""
    blocks, matrices, group = saved

    def of_block(gradient: Array, index: Array) -> Array:
        return gradient @ jax.lax.dynamic_index_in_dim(matrices, index, keepdims=False).T

    def add(total: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, None]:
        block, gradient, index = inputs

        def added(total: Array) -> Array:
            return total.at[index].add((block.T @ gradient).astype(total.dtype))

        if incomplete:
            return jax.lax.cond(index < len(matrices), added, lambda total: total, total), None
        return added(total), None

    total = jnp.zeros(matrices.shape, jnp.float32)
    of_matrices, _ = jax.lax.scan(add, total, (blocks, gradient, group))
    of_blocks = _over_blocks(of_block, gradient, group, len(matrices) if incomplete else None)
    return of_blocks, of_matrices.astype(matrices.dtype), None


_product.defvjp(_forward, _backward)


def _over_blocks(
    function: Callable[[Array, Array], Array], blocks: Blocks, group: Group, known: int | None
) -> Products:
    """Apply `function` to each block and its group, in a loop. Groups from `known` on give zeros."""
    result = jax.eval_shape(function, blocks[0], group[0])

    def apply(inputs: tuple[Array, Array]) -> Array:
        if known is None:
            return function(*inputs)
        zeros = jnp.zeros(result.shape, result.dtype)
        return jax.lax.cond(inputs[1] < known, function, lambda block, index: zeros, *inputs)

    return jax.lax.map(apply, (blocks, group))
