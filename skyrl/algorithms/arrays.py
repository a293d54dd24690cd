"""Helpers for masked arrays `[batch, tokens]`, in NumPy, torch and JAX.

Values where the mask is 0 are never read, so padding may contain NaN.
"""

from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_torch_array
from jaxtyping import Bool, Float, Shaped

Tokens = Float[Any, "batch tokens"]
Mask = Shaped[Any, "batch tokens"]
"""Non-zero (or True) for tokens that count."""

ROUNDING = 1e-5
"""Tolerance of equal log-probabilities, in nats. Different micro-batches cause differences of about 1e-6 in float32."""


def is_set(mask: Mask) -> Bool[Any, "batch tokens"]:
    """Return the mask as booleans."""
    return mask if array_namespace(mask).isdtype(mask.dtype, "bool") else mask != 0


def select(mask: Mask, values: Tokens) -> Tokens:
    """Return the values where the mask is set, 0 elsewhere."""
    return array_namespace(values).where(is_set(mask), values, 0.0)


def count(mask: Mask, like: Tokens) -> Float[Any, "batch"]:
    """Return the number of unmasked tokens of each row, as floats with the dtype of `like`."""
    xp = array_namespace(like)
    return xp.sum(xp.astype(is_set(mask), like.dtype), axis=1)


def place(values: np.ndarray, like: Any, dtype: Any = None) -> Any:
    """Convert a NumPy array to the library and device of `like`. The array keeps its dtype unless `dtype` is given."""
    return array_namespace(like).asarray(values, dtype=dtype, device=device(like))


def to_numpy(values: Any) -> np.ndarray:
    """Convert values of any library and device to NumPy float64."""
    if is_torch_array(values):
        return values.detach().cpu().double().numpy()
    return np.asarray(values).astype(np.float64)


def magnitude(difference: Tokens) -> Tokens:
    """Return the absolute value. Up to `ROUNDING`, the value and its gradient are 0.

    For fresh samples, differences of log-probabilities are rounding noise. The gradient of the absolute value is the
    sign of the difference, and the sign of noise is random.
    """
    xp = array_namespace(difference)
    return xp.where(xp.abs(difference) <= ROUNDING, xp.zeros_like(difference), xp.abs(difference))


def whiten(values: Tokens, mask: Mask) -> Tokens:
    """Whiten values to mean 0 and variance 1 over all tokens in the mask (unbiased variance plus 1e-8); 0 elsewhere.

    Padding does not affect the result: tokens outside the mask do not count in mean and variance.
    """
    xp = array_namespace(values)
    total = xp.sum(count(mask, values))
    mean = xp.sum(select(mask, values)) / xp.maximum(total, xp.ones_like(total))
    centred = select(mask, values - mean)
    variance = xp.sum(centred * centred) / xp.maximum(total - 1, xp.ones_like(total))
    return centred / xp.sqrt(variance + 1e-8)
