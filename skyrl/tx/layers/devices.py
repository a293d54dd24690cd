"""The mesh of devices that a program is compiled for, as JAX's context has it."""

import jax


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
