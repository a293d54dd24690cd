"""Conversion of device arrays to host arrays, and to tensors of files."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl.utils.files.tensor_file import Tensor


def on_host(array: Any, place: tuple[int, ...] = ()) -> np.ndarray:
    """Return an array on the host, or only the part at index `place` of the first axes.

    Arrays of an accelerator are copied first, because JAX would keep the host copy for as long as the device array
    lives. The parts of an array on several devices are copied one by one: no program runs on more than one device, so
    it can run at any time.
    """
    if isinstance(array, jax.Array) and len(array.devices()) > 1:
        return _joined(array, place)
    if isinstance(array, jax.Array) and next(iter(array.devices())).platform != "cpu":
        return np.asarray(array[place] if place else jnp.copy(array))
    return np.asarray(array)[place] if place else np.asarray(array)


def _joined(array: jax.Array, place: tuple[int, ...]) -> np.ndarray:
    """Join the parts of an array on several devices."""
    joined = np.empty(array.shape[len(place) :], array.dtype)
    done = set()
    for shard in array.addressable_shards:
        bounds = [cut.indices(size)[:2] for cut, size in zip(shard.index, array.shape, strict=True)]
        within = all(start <= at < end for at, (start, end) in zip(place, bounds, strict=False))
        if within and tuple(bounds) not in done:
            done.add(tuple(bounds))
            own = tuple(at - start for at, (start, _) in zip(place, bounds, strict=False))
            joined[shard.index[len(place) :]] = np.asarray(shard.data[own] if own else jnp.copy(shard.data))
    return joined


def tensor_of(array: Any) -> Tensor:
    """Return an array of any device as a tensor of a file."""
    return Tensor(array.shape, np.dtype(array.dtype), lambda: on_host(array))
