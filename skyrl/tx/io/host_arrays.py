"""Conversion of device arrays to host arrays, and to tensors of files."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl.utils.files.tensor_file import Tensor


def on_host(array: Any, place: tuple[int, ...] = ()) -> np.ndarray:
    """Return an array on the host, or only the part at index `place` of the first axes.

    Arrays of an accelerator are copied first, because JAX would keep the host copy for as long as the device array
    lives.
    """
    if isinstance(array, jax.Array) and next(iter(array.devices())).platform != "cpu":
        return np.asarray(array[place] if place else jnp.copy(array))
    return np.asarray(array)[place] if place else np.asarray(array)


def tensor_of(array: Any) -> Tensor:
    """Return an array of any device as a tensor of a file."""
    return Tensor(array.shape, np.dtype(array.dtype), lambda: on_host(array))
