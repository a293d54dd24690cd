"""The low-rank part of a linear map, for one adapter or for a slot of a bank per row.

`Lora` is a view of an adapter at some place of the model: layers hand `lora.at("self_attn")` down to their parts. The
matrices of a bank are finite (`skyrl.tx.lora.write_slot` sees to it; a slot that was not has a scaling of NaN), so what
a row keeps of other slots is exactly 0.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
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

    def of_layer(self, layer: int) -> "Lora":
        """The view of one layer."""
        layers = self.weights["layers"]
        if isinstance(layers, list):
            return self._replace(weights=layers[layer])
        return self._replace(weights=jax.tree.map(lambda leaf: leaf[layer], layers))

    def delta(self, x: Float[Array, "batch *rest in"]) -> Float[Array, "batch *rest out"]:
        """scaling * (x A) B in float32, of the pair that this view has come to.

        With slots, all matrices of the bank are one product each way, in which a row keeps the part of its own slot.
        """
        a, b = self.weights["lora_A"], self.weights["lora_B"]
        x = x.astype(jnp.float32)
        if self.slots is None:
            return (jnp.einsum("...i,ir->...r", x, a) * self.scaling) @ b
        _, slots, rank = a.shape
        low = (x @ a.reshape(-1, slots * rank)).reshape(*x.shape[:-1], slots, rank)
        per_row = (len(x), *[1] * x.ndim)
        own = self.slots.reshape(per_row) == jnp.arange(slots).reshape(*[1] * (x.ndim - 1), slots, 1)
        low = jnp.where(own, low * self.scaling.reshape(per_row), 0.0)
        return low.reshape(*x.shape[:-1], slots * rank) @ b.reshape(slots * rank, -1)
