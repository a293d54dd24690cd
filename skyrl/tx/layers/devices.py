"""The devices that a program is compiled for: their mesh, as JAX's context has it, and their platform."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

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
