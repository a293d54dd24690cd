"""The low-rank part of a linear map, for one adapter or for a slot of a bank per row.

`Lora` is a view of an adapter at some place of the model: layers hand `lora.at("self_attn")` down to their parts. Rows
of different slots are multiplied with their own gathered matrices, never with a sum over slots, so that one tenant's
NaN stays its own.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

if TYPE_CHECKING:  # models import layers
    from skyrl.tx.models.types import Adapter


class Lora(NamedTuple):
    """A part of an adapter's weights and how to apply it. A pytree."""

    weights: dict[str, Any]
    scaling: Float[Array, ""] | Float[Array, "batch"]
    """One for all rows, or one per row."""
    slots: Int[Array, "batch"] | None
    """Slot of each row where the weights are a bank's."""

    @classmethod
    def of(cls, adapter: "Adapter", slots: Int[Array, "batch"] | None) -> "Lora":
        """The view of a whole adapter (`slots` None) or bank."""
        return cls(adapter.weights, adapter.scaling if slots is None else adapter.scaling[slots], slots)

    def at(self, name: str) -> "Lora":
        """The view of a part."""
        return self._replace(weights=self.weights[name])

    def delta(self, x: Float[Array, "batch *rest in"]) -> Float[Array, "batch *rest out"]:
        """scaling * (x A) B in float32, of the pair that this view has come to."""
        a, b = self.weights["lora_A"], self.weights["lora_B"]
        x = x.astype(jnp.float32)
        if self.slots is None:
            return (jnp.einsum("...i,ir->...r", x, a) * self.scaling) @ b
        rows = x.reshape(x.shape[0], -1, x.shape[-1])
        low = jnp.einsum("bti,bir->btr", rows, a[self.slots]) * self.scaling[:, None, None]
        return jnp.einsum("btr,bro->bto", low, b[self.slots]).reshape(*x.shape[:-1], b.shape[-1])
