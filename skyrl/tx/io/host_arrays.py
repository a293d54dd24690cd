"""Arrays of a device as arrays of the host, and as tensors of files."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl.utils.files.tensor_file import Tensor


def on_host(array: Any, place: tuple[int, ...] = ()) -> np.ndarray:
    """An array, or what is at some place of its first axes. One of a device is copied for the caller alone.

    JAX would keep a copy of the whole array with it, for as long as that lives.
    """
    if isinstance(array, jax.Array) and next(iter(array.devices())).platform != "cpu":
        return np.asarray(array[place] if place else jnp.copy(array))
    return np.asarray(array)[place] if place else np.asarray(array)


def tensor_of(array: Any) -> Tensor:
    """Contents of an array, wherever it is."""
    return Tensor(array.shape, np.dtype(array.dtype), lambda: on_host(array))
