"""The feed-forward block of a dense layer."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from skyrl.tx.design.design import Gated
from skyrl.tx.layers.linear import Linear
from skyrl.tx.layers.lora import Lora

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True)}


Hidden = Float[Array, "batch tokens hidden"]


class GatedLayer(nnx.Module):
    """activation(gate) * up, projected down."""

    def __init__(self, design: Gated, shapes: dict[str, Any], dtype: jnp.dtype, rngs: nnx.Rngs):
        self.activation = design.activation
        self.gate_proj = Linear(shapes["gate_proj"], dtype, rngs)
        self.up_proj = Linear(shapes["up_proj"], dtype, rngs)
        self.down_proj = Linear(shapes["down_proj"], dtype, rngs)

    def __call__(self, x: Hidden, lora: Lora | None) -> Hidden:
        """Apply to each token."""
        gate = self.gate_proj(x, lora and lora.at("gate_proj"))
        up = self.up_proj(x, lora and lora.at("up_proj"))
        return self.down_proj(ACTIVATIONS[self.activation](gate) * up, lora and lora.at("down_proj"))
