"""A linear map with an optional adapter."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from skyrl.tx.layers.lora import Lora


class Linear(nnx.Module):
    """x W + b in the base dtype; the adapter's part is added in float32."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (in_features, out_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "batch *rest in"], lora: Lora | None) -> Float[Array, "batch *rest out"]:
        """Apply to the last axis."""
        y = x @ self.kernel[...]
        if self.bias is not None:
            y = y + jnp.expand_dims(self.bias[...], tuple(range(y.ndim - 1)))
        return y if lora is None else (y.astype(jnp.float32) + lora.delta(x)).astype(y.dtype)
