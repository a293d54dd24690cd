"""A linear layer with an optional adapter."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from skyrl.tx.layers.devices import platform
from skyrl.tx.layers.lora import Lora

FEW_TOKENS = 64
"""Maximum number of tokens for which the weight is the left operand of a product."""


def product(
    x: Float[Array, "*leading in"], weight: Float[Array, "out in"], dtype: Any = None
) -> Float[Array, "*leading out"]:
    """Compute x W^T, in the given dtype or the dtype of the inputs.

    On a CPU, XLA copies the right operand of a product into packed form. With few tokens, that takes longer than the
    product itself if it is the weight. The barrier keeps XLA from swapping the operands.
    """
    leading = x.shape[:-1]
    if math.prod(leading) > FEW_TOKENS or platform() != "cpu":
        return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=dtype)
    turned = jnp.einsum("oi,ti->ot", weight, x.reshape(-1, x.shape[-1]), preferred_element_type=dtype)
    return jax.lax.optimization_barrier(turned).T.reshape(*leading, -1)


class Linear(nnx.Module):
    """x W^T + b in the base dtype. The output of the adapter is added in float32."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: jnp.dtype, rngs: nnx.Rngs):
        """Initialise from the shapes of "weight" and, optionally, "bias"."""
        self.weight = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shapes["weight"], dtype))
        self.bias = nnx.Param(jnp.zeros(shapes["bias"], dtype)) if "bias" in shapes else None

    def __call__(self, x: Float[Array, "batch *rest in"], lora: Lora | None) -> Float[Array, "batch *rest out"]:
        """Apply to the last axis."""
        y = product(x, self.weight[...])
        if self.bias is not None:
            y = y + jnp.expand_dims(self.bias[...], tuple(range(y.ndim - 1)))
        return y if lora is None else (y.astype(jnp.float32) + lora.delta(x)).astype(y.dtype)
