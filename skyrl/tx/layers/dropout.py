"""Deterministic dropout: masks depend only on a key and the position in the model, so that a pass can be repeated."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


class Dropout(NamedTuple):
    """Inverted dropout at a position in the model. A pytree.

    Source: Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html, scaled in training as `nn.Dropout`.
    """

    rate: Float[Array, ""]
    """Probability that a number is set to zero."""
    key: UInt32[Array, "2"]
    """Key of a counter-based generator."""

    def at(self, place: int | Int[Array, ""]) -> "Dropout":
        """Return the dropout of a part of this position. `place` identifies the part by a number below 2**32."""
        folded = jax.random.fold_in(self._generator, place)
        return self._replace(key=jax.random.key_data(folded))

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Set masked numbers to zero and divide all others by 1 - rate."""
        kept = jax.random.bernoulli(self._generator, 1 - self.rate, x.shape)
        return jnp.where(kept, x / (1 - self.rate), 0)

    @property
    def _generator(self) -> jax.Array:
        return jax.random.wrap_key_data(self.key, impl="threefry2x32")
