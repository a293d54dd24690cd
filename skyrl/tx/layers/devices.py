"""The devices that a program is compiled for: their mesh, as JAX's context has it, and their platform."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

_platform: ContextVar[str | None] = ContextVar("platform", default=None)


def platform() -> str:
    """Return the platform that programs are compiled for: that of `compiling_for`, or of this process's devices."""
    return _platform.get() or jax.default_backend()


@contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """Trace and compile programs for a platform whose devices need not be here."""
    before = _platform.set(name)
    try:
        yield
    finally:
        _platform.reset(before)


def axis_size(name: str) -> int:
    """Return the number of devices along an axis of the mesh. 1 without a mesh."""
    return jax.sharding.get_abstract_mesh().shape.get(name, 1)


ROWS = "rows"
"""Name of the axis of a `vmap` over parts of a batch that are split over devices of `fsdp`."""


def is_mapped(name: str) -> bool:
    """Return True if the caller is in a `vmap` over an axis of this name."""
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gathered(axis: int, x: Array) -> Array:
    """Copy the parts of a weight, split along one of its axes, from the devices of `fsdp` to each other.

    The gradient is summed and split again. `axis` is counted from the end.
    """
    return _split(axis, None, x)


def _split(axis: int, over: str | None, x: Array) -> Array:
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec[axis] = over
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


gathered.defvjp(
    lambda axis, x: (_split(axis, None, x), None),
    lambda axis, _, gradient: (_split(axis, "fsdp", gradient),),
)
