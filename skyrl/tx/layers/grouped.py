"""Grouped matrix products: each row is multiplied by the matrix of its group. Used for experts and their adapters.

Rows are sorted by group and divided into blocks of one group each; the last block of a group is padded. A product is a
loop over blocks with one matrix each, so work and memory grow with the number of rows, not with rows times groups. An
accelerator computes several blocks in a step, as one batched product. On a device that has the matrices of some groups
only, rows of other groups are in no block.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from skyrl.tx.layers.devices import platform

LARGEST_BLOCK, BLOCKS_AT_ONCE = 64, 1
"""Maximum rows of a block, and blocks of a step, on a CPU. Smaller blocks need less padding at the ends of groups."""
ACCELERATED = 512, 8
"""The same on accelerators, where a step of a loop takes microseconds whatever it computes."""

Tokens = Float[Array, "tokens in"]
Rows = Float[Array, "rows in"]
Source = Int[Array, "blocks size"]
Place = Int[Array, "rows"]
Blocks = Float[Array, "blocks size in"]
Products = Float[Array, "blocks size out"]
Matrices = Float[Array, "groups in out"]
Group = Int[Array, "steps at_once"]
Used = Int[Array, ""] | None

_at = partial(jax.lax.dynamic_index_in_dim, keepdims=False)
_put = partial(jax.lax.dynamic_update_index_in_dim, axis=0)


class Grouping(NamedTuple):
    """Assignment of rows to positions in blocks. A pytree."""

    source: Source
    """Row at each position. Padding has the total number of rows."""
    place: Place
    """Position of each row, counted over all blocks. Rows in no block have the total number of positions."""
    group: Group
    """Group of each block, by steps of the loop."""
    used: Used
    """Number of steps with rows, which are the first ones. None: products are computed for all blocks."""

    def gather(self, tokens: Tokens, each: int) -> Blocks:
        """Arrange rows in blocks, with zeros as padding. Row i of the grouping is token i // each."""
        return _gathered(each, tokens, self.source, self.place)

    def scatter(self, blocks: Blocks) -> Rows:
        """Return rows in their original order: the inverse of `gather` with `each` = 1. Rows in no block are zeros."""
        return _scattered(blocks, self.source, self.place)


# The gradient of each is a gather, too, because XLA's scatter-add on a CPU adds one row at a time.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(each: int, tokens: Tokens, source: Source, place: Place) -> Blocks:
    token = jnp.where(source < place.shape[0], source // each, tokens.shape[0])
    return tokens.at[token].get(mode="fill", fill_value=0)


def _gathered_backward(each: int, place: Place, gradient: Blocks) -> tuple[Tokens, None, None]:
    return _read(gradient, place).reshape(-1, each, gradient.shape[-1]).sum(axis=1), None, None


_gathered.defvjp(
    lambda each, tokens, source, place: (_gathered(each, tokens, source, place), place), _gathered_backward
)


@jax.custom_vjp
def _scattered(blocks: Blocks, source: Source, place: Place) -> Rows:
    return _read(blocks, place)


def _scattered_backward(source: Source, gradient: Rows) -> tuple[Blocks, None, None]:
    return gradient.at[source].get(mode="fill", fill_value=0), None, None


_scattered.defvjp(lambda blocks, source, place: (_scattered(blocks, source, place), source), _scattered_backward)


def _read(blocks: Blocks, place: Place) -> Rows:
    return blocks.reshape(-1, blocks.shape[-1]).at[place].get(mode="fill", fill_value=0)


def grouped(groups: Int[Array, "rows"], count: int, of: int | None = None) -> Grouping:
    """Assign rows to blocks by their groups.

    Args:
        groups: Group of each row. Rows of groups that are not in range(count) are in no block.
        count: Number of groups here.
        of: Number of groups on all devices, from which the size of blocks is chosen. None: `count`, and all rows are of
            groups in range(count).
    """
    rows = groups.shape[0]
    largest, at_once = (LARGEST_BLOCK, BLOCKS_AT_ONCE) if platform() == "cpu" else ACCELERATED
    size = 1
    while 2 * size <= min(largest, rows // (of or count)):
        size *= 2
    most = (rows - min(rows, count)) // size + min(rows, count)
    most += -most % at_once
    if of is not None:
        groups = jnp.where((groups >= 0) & (groups < count), groups, count)
    order = jnp.argsort(groups, stable=True)
    sizes = jnp.zeros(count, jnp.int32).at[groups].add(1, mode="drop")
    blocks = (sizes + size - 1) // size
    last_block, last_row = jnp.cumsum(blocks), jnp.cumsum(sizes)
    in_order = groups[order]
    within = jnp.arange(rows, dtype=jnp.int32) - (last_row - sizes)[in_order]
    sorted_place = (last_block - blocks)[in_order] * size + within
    if of is not None:
        sorted_place = jnp.where(in_order < count, sorted_place, most * size)
    place = jnp.zeros(rows, jnp.int32).at[order].set(sorted_place)
    source = jnp.full(most * size, rows, jnp.int32).at[sorted_place].set(order.astype(jnp.int32), mode="drop")
    group = jnp.searchsorted(last_block, jnp.arange(most, dtype=jnp.int32), side="right")
    group = jnp.minimum(group, count - 1).astype(jnp.int32).reshape(-1, at_once)
    used = None if of is None else (last_block[-1] + at_once - 1) // at_once
    return Grouping(source.reshape(most, size), place, group, used)


def grouped_product(blocks: Blocks, matrices: Matrices, grouping: Grouping, slots: int = 1) -> Products:
    """Multiply each block by the matrix of its group, which is shared by `slots` consecutive groups.

    Groups may be empty. Blocks that are not used give zeros.
    """
    group = grouping.group // slots
    products: Products = _product(blocks, matrices, group, grouping.used)  # pyright: ignore[reportAssignmentType]
    return products


@jax.custom_vjp
def _product(blocks: Blocks, matrices: Matrices, group: Group, used: Used) -> Products:
    return _forward(blocks, matrices, group, used)[0]


def _forward(
    blocks: Blocks, matrices: Matrices, group: Group, used: Used
) -> tuple[Products, tuple[Blocks, Matrices, Group, Used]]:
    def product(step: Array, made: Array) -> Array:
        return _put(made, _at(steps, step) @ _of_groups(matrices, _at(group, step)), step)

    steps = _by_steps(blocks, group)
    made = jnp.zeros((*steps.shape[:-1], matrices.shape[-1]), blocks.dtype)
    made = _over_steps(product, made, len(group), used)
    return made.reshape(*blocks.shape[:-1], -1), (blocks, matrices, group, used)


def _backward(saved: tuple[Blocks, Matrices, Group, Used], gradient: Products) -> tuple[Blocks, Matrices, None, None]:
    """Compute the gradients of blocks and matrices. A matrix's gradient is summed in place over its group's blocks."""
    blocks, matrices, group, used = saved
    steps, of_products = _by_steps(blocks, group), _by_steps(gradient, group)

    def product(step: Array, made: Array) -> Array:
        own = _of_groups(matrices, _at(group, step))
        return _put(made, jnp.einsum("bso,bio->bsi", _at(of_products, step), own), step)

    def add(step: Array, total: Array) -> Array:
        groups, of_blocks = _at(group, step), jnp.einsum("bsi,bso->bio", _at(steps, step), _at(of_products, step))
        if len(groups) == 1:
            return total.at[groups[0]].add(of_blocks[0].astype(total.dtype))
        return total.at[groups].add(of_blocks.astype(total.dtype))

    of_matrices = _over_steps(add, jnp.zeros(matrices.shape, jnp.float32), len(group), used)
    return (
        _over_steps(product, jnp.zeros_like(steps), len(group), used).reshape(blocks.shape),
        of_matrices.astype(matrices.dtype),
        None,
        None,
    )


_product.defvjp(_forward, _backward)


def _by_steps(blocks: Blocks, group: Group) -> Float[Array, "steps at_once size in"]:
    return blocks.reshape(*group.shape, *blocks.shape[1:])


def _of_groups(matrices: Matrices, groups: Int[Array, "at_once"]) -> Float[Array, "at_once in out"]:
    """Return the matrix of each group."""
    return _at(matrices, groups[0])[None] if len(groups) == 1 else matrices[groups]


def _over_steps(step: Callable[[Array, Array], Array], start: Array, count: int, used: Used) -> Array:
    """Carry an array over `count` steps, or over the used ones."""
    return jax.lax.fori_loop(0, count if used is None else _largest(used), step, start)


@jax.custom_batching.custom_vmap
def _largest(count: Array) -> Array:
    """Return the largest count of a batch: a bound of a loop cannot be batched."""
    return count


@_largest.def_vmap
def _largest_of_batch(size: int, in_batched: list[bool], counts: Array) -> tuple[Array, bool]:
    return (counts.max() if in_batched[0] else counts), False
