"""The low-rank part of a linear map, for one adapter or for a slot of a bank per row.

`Lora` is a view of an adapter at some place of the model: layers hand `lora.at("self_attn")` down to their parts. The
matrices of a bank are finite (`skyrl.tx.lora.write_slot` sees to it; a slot that was not has a scaling of NaN), so what
a row keeps of other slots is exactly 0.
"""

import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from skyrl.tx.layers.dropout import Dropout

if TYPE_CHECKING:  # models import layers
    from skyrl.tx.layers.adapter import Adapter


class Lora(NamedTuple):
    """A part of an adapter's weights and how to apply it. A pytree."""

    weights: dict[str, Any]
    scaling: Float[Array, ""] | Float[Array, "batch"]
    """One for all rows, or one per row."""
    slots: Int[Array, "batch"] | None
    """Slot of each row where the weights are a bank's."""
    dropout: Dropout | None = None
    """Dropout of what this part reads."""

    @classmethod
    def of(cls, adapter: "Adapter", slots: Int[Array, "batch"] | None) -> "Lora":
        """The view of a whole adapter (`slots` None) or bank."""
        scaling = adapter.scaling if slots is None else adapter.scaling[slots]
        return cls(adapter.weights, scaling, slots, adapter.dropout)

    def at(self, name: str) -> "Lora":
        """The view of a part."""
        dropout = self.dropout and self.dropout.at(zlib.crc32(name.encode()))
        return self._replace(weights=self.weights[name], dropout=dropout)

    def of_layer(self, group: str, layer: int | Int[Array, ""], weights: Any = None) -> "Lora":
        """The view of one layer of a group, of whose weights those of the layer may be given."""
        all_layers = self.at(group)
        if weights is None:
            layers: Any = all_layers.weights
            weights = layers[layer] if isinstance(layers, list) else jax.tree.map(lambda leaf: leaf[layer], layers)
        return all_layers._replace(weights=weights, dropout=all_layers.dropout and all_layers.dropout.at(layer))

    def read(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The float32 input of A, given that of the linear map."""
        x = x.astype(jnp.float32)
        return x if self.dropout is None else self.dropout(x)

    def of_rows(self, rows: int) -> tuple[Float[Array, "batch in rank"], Float[Array, "batch rank out"]]:
        """A and scaling * B of each of so many rows, which have zeros where they have no adapter."""
        a, b = self.weights["lora_A"], self.weights["lora_B"]
        if self.slots is None:
            return jnp.broadcast_to(a, (rows, *a.shape)), jnp.broadcast_to(b * self.scaling, (rows, *b.shape))
        slots = jnp.maximum(self.slots, 0)
        scaling = jnp.where(self.slots < 0, 0.0, self.scaling)
        return jnp.moveaxis(a[:, slots], 1, 0), b[slots] * scaling[:, None, None]

    def delta(self, x: Float[Array, "batch *rest in"]) -> Float[Array, "batch *rest out"]:
        """scaling * (x A) B in float32, of the pair that this view has come to.

        With slots, all matrices of the bank are one product each way, in which a row keeps the part of its own slot.
        """
        a, b = self.weights["lora_A"], self.weights["lora_B"]
        x = self.read(x)
        if self.slots is None:
            return _product(x, a, b, self.scaling)
        _, slots, rank = a.shape
        low = (x @ a.reshape(-1, slots * rank)).reshape(*x.shape[:-1], slots, rank)
        per_row = (len(x), *[1] * x.ndim)
        own = self.slots.reshape(per_row) == jnp.arange(slots).reshape(*[1] * (x.ndim - 1), slots, 1)
        low = jnp.where(own, low * self.scaling.reshape(per_row), 0.0)
        return low.reshape(*x.shape[:-1], slots * rank) @ b.reshape(slots * rank, -1)


@jax.custom_vjp
def _product(
    x: Float[Array, "*leading in"], a: Float[Array, "in rank"], b: Float[Array, "rank out"], scaling: Float[Array, ""]
) -> Float[Array, "*leading out"]:
    """scaling * (x A) B, of which `scaling` is a constant."""
    return _forward(x, a, b, scaling)[0]


def _forward(x: Array, a: Array, b: Array, scaling: Array) -> tuple[Array, tuple[Array, ...]]:
    low = (x @ a) * scaling
    return low @ b, (x, low, a, b, scaling)


def _backward(saved: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, Array, None]:
    """Weight gradients as products in which the narrow factor is the one that has to be transposed."""
    x, low, a, b, scaling = saved
    of_low = (gradient @ b.T) * scaling
    return of_low @ a.T, _summed_product(of_low, x).T, _summed_product(low, gradient), None


def _summed_product(narrow: Float[Array, "*leading rank"], wide: Float[Array, "*leading n"]) -> Float[Array, "rank n"]:
    """Outer products of the last axes, summed over all others."""
    rows = narrow.reshape(-1, narrow.shape[-1]), wide.reshape(-1, wide.shape[-1])
    return jax.lax.dot_general(*rows, (((0,), (0,)), ((), ())))


_product.defvjp(_forward, _backward)
