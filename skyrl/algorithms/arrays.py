"""Helpers of every algorithm for arrays `[batch, tokens]` with a mask, in NumPy, torch and JAX alike.

Where the mask is 0 nothing is read: padding may hold NaN.
"""

from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_torch_array
from jaxtyping import Bool, Float, Shaped

Tokens = Float[Any, "batch tokens"]
Mask = Shaped[Any, "batch tokens"]
"""Non-zero (or True) where a token counts."""

ROUNDING = 1e-5
"""Nats below which log-probabilities count as equal. Passes over other micro-batches differ by some 1e-6 in float32."""


def is_set(mask: Mask) -> Bool[Any, "batch tokens"]:
    """The mask as booleans."""
    return mask if array_namespace(mask).isdtype(mask.dtype, "bool") else mask != 0


def select(mask: Mask, values: Tokens) -> Tokens:
    """The values where the mask is set, 0 elsewhere."""
    return array_namespace(values).where(is_set(mask), values, 0.0)


def count(mask: Mask, like: Tokens) -> Float[Any, "batch"]:
    """Tokens that count in each row, as floats of the type of `like`."""
    xp = array_namespace(like)
    return xp.sum(xp.astype(is_set(mask), like.dtype), axis=1)


def place(values: np.ndarray, like: Any, dtype: Any = None) -> Any:
    """A NumPy array in the library and on the device of `like`, with its own dtype unless another is given."""
    return array_namespace(like).asarray(values, dtype=dtype, device=device(like))


def to_numpy(values: Any) -> np.ndarray:
    """The values as NumPy float64, from any library and device."""
    if is_torch_array(values):
        return values.detach().cpu().double().numpy()
    return np.asarray(values).astype(np.float64)


def magnitude(difference: Tokens) -> Tokens:
    """The absolute value; 0, with a gradient of 0, within `ROUNDING`.

    On fresh samples a difference of log-probabilities is rounding noise, and so is its sign, the derivative elsewhere.
    """
    xp = array_namespace(difference)
    return xp.where(xp.abs(difference) <= ROUNDING, xp.zeros_like(difference), xp.abs(difference))


def whiten(values: Tokens, mask: Mask) -> Tokens:
    """The values with mean 0 and variance 1 over all tokens that count (unbiased variance plus 1e-8); 0 elsewhere.

    The result does not depend on padding: neither mean nor variance sees tokens outside the mask.
    """
    xp = array_namespace(values)
    total = xp.sum(count(mask, values))
    mean = xp.sum(select(mask, values)) / xp.maximum(total, xp.ones_like(total))
    centred = select(mask, values - mean)
    variance = xp.sum(centred * centred) / xp.maximum(total - 1, xp.ones_like(total))
    return centred / xp.sqrt(variance + 1e-8)
