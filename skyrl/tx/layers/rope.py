"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from skyrl.tx.design.design import Frequencies


class Rotation(NamedTuple):
    """Cosine and sine of each token's angles, float32. A pytree."""

    cos: Float[Array, "batch tokens 1 half"]
    sin: Float[Array, "batch tokens 1 half"]

    @classmethod
    def at(cls, positions: Int[Array, "batch tokens"], frequencies: Frequencies) -> "Rotation":
        """Compute the rotation by the angles position * frequency."""
        values = jnp.asarray(np.asarray(frequencies.values, np.float32))
        angles = positions.astype(jnp.float32)[:, :, None, None] * values[None, None, None, :]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return cls(cos, sin) if frequencies.factor == 1 else cls(cos * frequencies.factor, sin * frequencies.factor)

    def apply(
        self, x: Float[Array, "batch tokens heads head_dim"], interleaved: bool = False
    ) -> Float[Array, "batch tokens heads head_dim"]:
        """Rotate the pairs (i, i + half) in float32. Dimensions from 2 * half on are unchanged. Keeps the dtype of `x`.

        If `interleaved`, pairs are (2 i, 2 i + 1) in the input, and (i, i + half) in the output.
        """
        if interleaved:
            x = jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
        width = 2 * self.cos.shape[-1]
        first, second = jnp.split(x[..., :width].astype(jnp.float32), 2, axis=-1)
        rotated = [first * self.cos - second * self.sin, second * self.cos + first * self.sin]
        return jnp.concatenate([part.astype(x.dtype) for part in rotated] + [x[..., width:]], axis=-1)
