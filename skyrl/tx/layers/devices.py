"""The mesh of devices that a program is compiled for, as JAX's context has it."""

import jax


def axis_size(name: str) -> int:
    """Return the number of devices along an axis of the mesh. 1 without a mesh."""
    return jax.sharding.get_abstract_mesh().shape.get(name, 1)
