"""A linear layer with an optional adapter."""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from skyrl.tx.layers.lora import Lora


class Linear(nnx.Module):
    """x W + b in the base dtype. The output of the adapter is added in float32."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: jnp.dtype, rngs: nnx.Rngs):
        """Initialise from the shapes of "kernel" and, optionally, "bias"."""
        self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shapes["kernel"], dtype))
        self.bias = nnx.Param(jnp.zeros(shapes["bias"], dtype)) if "bias" in shapes else None

    def __call__(self, x: Float[Array, "batch *rest in"], lora: Lora | None) -> Float[Array, "batch *rest out"]:
        """Apply to the last axis."""
        y = x @ self.kernel[...]
        if self.bias is not None:
            y = y + jnp.expand_dims(self.bias[...], tuple(range(y.ndim - 1)))
        return y if lora is None else (y.astype(jnp.float32) + lora.delta(x)).astype(y.dtype)
