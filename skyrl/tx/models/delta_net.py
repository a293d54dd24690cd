"""Gated DeltaNet: a token mixer with a recurrent state of fixed size.

With a cache, each sequence has a state in its own slot. Tokens of segment -1 are padding of a chunk and do not change
the state.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from skyrl.tx.design.design import DeltaNet
from skyrl.tx.layers.linear import Linear
from skyrl.tx.layers.lora import Lora
from skyrl.tx.layers.norm import RMSNorm
from skyrl.tx.models.gated import ACTIVATIONS
from skyrl.tx.models.recurrence import States, convolution, delta_rule

if TYPE_CHECKING:  # a layer has one of these
    from skyrl.tx.models.layer import Context

Hidden = Float[Array, "batch tokens hidden"]


class DeltaNetLayer(nnx.Module):
    """Gated DeltaNet layer."""

    def __init__(self, design: DeltaNet, shapes: dict[str, Any], eps: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        """Create the layer with random weights. `eps` is the epsilon of the norm of head outputs."""
        self.design = design
        self.in_proj_qkv = Linear(shapes["in_proj_qkv"], dtype, rngs)
        self.in_proj_z = Linear(shapes["in_proj_z"], dtype, rngs)
        self.in_proj_b = Linear(shapes["in_proj_b"], dtype, rngs)
        self.in_proj_a = Linear(shapes["in_proj_a"], dtype, rngs)
        self.conv1d = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shapes["conv1d"], dtype))
        # float32 whatever the model's dtype, because errors of decay rates accumulate over tokens.
        self.dt_bias = nnx.Param(jnp.zeros(shapes["dt_bias"], jnp.float32))
        self.a_log = nnx.Param(jnp.zeros(shapes["a_log"], jnp.float32))
        self.norm = RMSNorm(*shapes["norm"]["scale"], eps=eps, dtype=dtype)
        self.out_proj = Linear(shapes["out_proj"], dtype, rngs)

    def __call__(
        self, x: Hidden, context: "Context", lora: Lora | None, cached: States | None
    ) -> tuple[Hidden, States | None]:
        """Return (output, states of the layer after these tokens)."""
        design, live, runs = self.design, context.segments >= 0, context.segments

        def projected(name: str) -> Array:
            return getattr(self, name)(x, lora and lora.at(name))

        if cached is None:
            window = jnp.zeros((len(x), design.width - 1, design.channels), x.dtype)
            memory = jnp.zeros((len(x), design.value_heads, design.key_dim, design.value_dim), jnp.float32)
        else:
            runs = jnp.zeros_like(runs)
            window, memory = cached.read(context.positions[:, 0] == 0)
        mixed, window = convolution(projected("in_proj_qkv"), window, self.conv1d[...][:, 0], runs, live)
        mixed = ACTIVATIONS[design.activation](mixed)
        query, key, value = jnp.split(mixed, [design.keys, 2 * design.keys], axis=-1)
        rate = jnp.exp(self.a_log[...])[None, None]
        wide = projected("in_proj_a").astype(jnp.float32) + self.dt_bias[...][None, None]
        strength = jax.nn.sigmoid(projected("in_proj_b").astype(jnp.float32))
        read, memory = delta_rule(
            self._of_value_heads(query) * design.key_dim**-0.5,
            self._of_value_heads(key),
            value.reshape(*x.shape[:2], design.value_heads, design.value_dim),
            jnp.where(live[:, :, None], -rate * jax.nn.softplus(wide), 0.0),
            jnp.where(live[:, :, None], strength, 0.0),
            runs,
            memory,
        )
        gate = projected("in_proj_z").astype(jnp.float32).reshape(read.shape)
        read = (self.norm(read) * jax.nn.silu(gate)).astype(x.dtype).reshape(*x.shape[:2], -1)
        output = self.out_proj(read, lora and lora.at("out_proj"))
        return output, None if cached is None else cached.write(window, memory)

    def _of_value_heads(self, x: Float[Array, "batch tokens keys"]) -> Float[Array, "batch tokens heads key_dim"]:
        """Return unit vectors: for each value head, the normalised vector of its key head."""
        x = x.reshape(*x.shape[:2], self.design.key_heads, self.design.key_dim)
        x = x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
        return jnp.repeat(x, self.design.value_heads // self.design.key_heads, axis=2)
