"""Rotary position embedding, the unscaled kind (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


class Rotation(NamedTuple):
    """Cosine and sine of each token's angles, float32. A pytree."""

    cos: Float[Array, "batch tokens 1 half"]
    sin: Float[Array, "batch tokens 1 half"]

    @classmethod
    def at(cls, positions: Int[Array, "batch tokens"], head_dim: int, theta: float) -> "Rotation":
        """Angles position * theta^(-2 i / head_dim) of the frequencies i < head_dim / 2."""
        frequencies = jnp.asarray(theta ** -(np.arange(0, head_dim, 2) / head_dim), jnp.float32)
        angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
        return cls(jnp.cos(angles), jnp.sin(angles))

    def apply(self, x: Float[Array, "batch tokens heads head_dim"]) -> Float[Array, "batch tokens heads head_dim"]:
        """Rotate the pairs (i, i + head_dim / 2), in float32; the result has the dtype of `x`."""
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        rotated = [first * self.cos - second * self.sin, second * self.cos + first * self.sin]
        return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def rope_theta(config: Any) -> float:
    """The base of the angles, from a configuration of transformers 5 (`rope_parameters`) or before (`rope_theta`).

    Raises ValueError for scaled variants, which are not implemented.
    """
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"rope_type={kind!r} is not implemented (known: default); use a base model without RoPE scaling, "
            "or remove rope_scaling from its config.json to serve its unscaled context"
        )
    return float(parameters.get("rope_theta", getattr(config, "rope_theta", 10_000.0)))
