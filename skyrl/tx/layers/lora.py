"""LoRA of a linear layer, for one adapter or for a bank with one slot per row.

`Lora` is a view of a part of an adapter: layers pass `lora.at("self_attn")` and so on to their parts. The matrices of a
bank are always finite: `skyrl.tx.lora.write_slot` replaces a non-finite adapter by zeros and a scaling of NaN. So other
slots contribute exactly 0 to a row.
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
    """View of a part of an adapter's weights. A pytree."""

    weights: dict[str, Any]
    scaling: Float[Array, ""] | Float[Array, "batch"]
    """One factor for all rows, or one per row."""
    slots: Int[Array, "batch"] | None
    """Slot of each row, negative for rows without an adapter. None if the weights are not a bank."""
    dropout: Dropout | None = None
    """Dropout of the inputs of this part."""

    @classmethod
    def of(cls, adapter: "Adapter", slots: Int[Array, "batch"] | None) -> "Lora":
        """Return the view of a whole adapter (`slots` None) or bank."""
        scaling = adapter.scaling if slots is None else adapter.scaling[slots]
        return cls(adapter.weights, scaling, slots, adapter.dropout)

    def at(self, name: str) -> "Lora":
        """Return the view of a part."""
        dropout = self.dropout and self.dropout.at(zlib.crc32(name.encode()))
        return self._replace(weights=self.weights[name], dropout=dropout)

    def of_layer(self, group: str, layer: int | Int[Array, ""], weights: Any = None) -> "Lora":
        """Return the view of one layer of a group. `weights` are the layer's. None: take them from the group."""
        all_layers = self.at(group)
        if weights is None:
            layers: Any = all_layers.weights
            weights = layers[layer] if isinstance(layers, list) else jax.tree.map(lambda leaf: leaf[layer], layers)
        return all_layers._replace(weights=weights, dropout=all_layers.dropout and all_layers.dropout.at(layer))

    def read(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Return the float32 input of A: the input of the linear layer with dropout, if any."""
        x = x.astype(jnp.float32)
        return x if self.dropout is None else self.dropout(x)

    def of_rows(self, rows: int) -> tuple[Float[Array, "batch in rank"], Float[Array, "batch rank out"]]:
        """Return A and scaling * B for each of `rows` rows. B is zero for rows without an adapter."""
        a, b = self.weights["lora_A"], self.weights["lora_B"]
        if self.slots is None:
            return jnp.broadcast_to(a, (rows, *a.shape)), jnp.broadcast_to(b * self.scaling, (rows, *b.shape))
        slots = jnp.maximum(self.slots, 0)
        scaling = jnp.where(self.slots < 0, 0.0, self.scaling)
        return jnp.moveaxis(a[:, slots], 1, 0), b[slots] * scaling[:, None, None]

    def delta(self, x: Float[Array, "batch *rest in"]) -> Float[Array, "batch *rest out"]:
        """Compute scaling * (x A) B in float32 for the LoRA pair of this view.

        With a bank, one product with all A matrices and one with all B matrices are computed; between them, each row
        keeps only the part of its own slot.
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
    """Compute scaling * (x A) B. `scaling` gets no gradient."""
    return _forward(x, a, b, scaling)[0]


def _forward(x: Array, a: Array, b: Array, scaling: Array) -> tuple[Array, tuple[Array, ...]]:
    low = (x @ a) * scaling
    return low @ b, (x, low, a, b, scaling)


def _backward(saved: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, Array, None]:
    """Compute the gradients. Weight gradients are arranged so that only the narrow factor has to be transposed."""
    x, low, a, b, scaling = saved
    of_low = (gradient @ b.T) * scaling
    return of_low @ a.T, _summed_product(of_low, x).T, _summed_product(low, gradient), None


def _summed_product(narrow: Float[Array, "*leading rank"], wide: Float[Array, "*leading n"]) -> Float[Array, "rank n"]:
    """Sum the outer products of the last axes over all other axes."""
    rows = narrow.reshape(-1, narrow.shape[-1]), wide.reshape(-1, wide.shape[-1])
    return jax.lax.dot_general(*rows, (((0,), (0,)), ((), ())))


_product.defvjp(_forward, _backward)
