"""Padding of adapters with zeros to a larger rank, which does not change their results."""

import operator

import jax
import jax.numpy as jnp
import numpy as np

from skyrl.tx.layers.adapter import Adapter


def fitted(adapter: Adapter, like: Adapter) -> Adapter:
    """A version in the form for sampling: `padded`, or unchanged if it has its own base weights."""
    return adapter if adapter.own_base is not None else padded(adapter, like)


def padded(adapter: Adapter, like: Adapter) -> Adapter:
    """Pad the ranks of an adapter to those of `like`. Returns the same object if there is nothing to pad.

    Raises ValueError for an adapter of another model.
    """

    def pad(leaf: jax.Array, room: jax.Array) -> jax.Array:
        if leaf.shape == room.shape:
            return leaf
        if leaf.ndim != room.ndim:
            raise ValueError(f"an adapter's array of shape {leaf.shape} cannot be one of shape {room.shape}")
        missing = [(0, wanted - size) for size, wanted in zip(leaf.shape, room.shape, strict=True)]
        wide = np.pad(leaf, missing)  # on the host, without compilation
        return jax.device_put(wide, room.sharding) if len(room.devices()) > 1 else jnp.asarray(wide)

    made = jax.tree.map(pad, adapter, like)
    same = all(map(operator.is_, jax.tree.leaves(made), jax.tree.leaves(adapter)))
    return adapter if same else made
