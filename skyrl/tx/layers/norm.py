"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def normalised(x: Float[Array, "*leading size"], eps: float) -> Float[Array, "*leading size"]:
    """Compute x / rms(x) in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """x / rms(x) * (scale + offset), computed in float32 over the last axis (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, *, eps: float, dtype: jnp.dtype, offset: float = 0.0):
        self.scale = nnx.Param(jnp.full((size,), 1 - offset, dtype))
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*leading size"]) -> Float[Array, "*leading size"]:
        """Normalise the last axis; the result has the dtype of `x`."""
        wide = normalised(x, self.eps)
        scale = jnp.expand_dims(self.scale[...].astype(jnp.float32), tuple(range(x.ndim - 1)))
        return (wide * (scale + self.offset if self.offset else scale)).astype(x.dtype)
