"""The trainable state of models: one pytree each, nothing shared between tenants.

A model owns its adapter, its gradient sums and its Adam moments, all float32. Arrays are never changed, only replaced
as a whole, so a checkpoint or a published version is a reference to the arrays of that moment.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from skyrl.tx.lora import lora_targets, zero_pair
from skyrl.tx.models.types import Adapter
from skyrl.types import LoraConfig

if TYPE_CHECKING:
    from skyrl.tx.models.configs import ModelConfig

Tree = dict[str, Any]
"""Arrays in the structure of `Adapter.weights`."""
COPIES = 4
"""Trees that a model has at most: weights, gradient sums and two moments."""


@dataclass
class ModelState:
    """One model. Gradient sums are None until a pass adds to them."""

    lora_config: LoraConfig
    adapter: Adapter
    first_moment: Tree
    second_moment: Tree
    step: int = 0
    """Optimizer steps taken."""
    gradient_sums: Tree | None = None

    @classmethod
    def fresh(cls, lora_config: LoraConfig, adapter: Adapter) -> "ModelState":
        """A model that has taken no step."""
        return cls(lora_config, adapter, zeros_like(adapter.weights), zeros_like(adapter.weights))

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays, as a pytree."""
        return self.adapter, self.first_moment, self.second_moment, self.gradient_sums

    def with_arrays(self, arrays: tuple[Any, ...]) -> "ModelState":
        """The same model with its arrays elsewhere."""
        adapter, first, second, sums = arrays
        return ModelState(self.lora_config, adapter, first, second, self.step, sums)

    @property
    def nbytes(self) -> int:
        """Memory of all arrays, gradient sums included whether they are there or not."""
        return COPIES * sum(leaf.nbytes for leaf in jax.tree.leaves(self.adapter.weights))


def model_bytes(model_config: "ModelConfig", rank: int) -> int:
    """`nbytes` of a model of a padded rank, before there is one."""
    return COPIES * sum(
        leaf.nbytes for target in lora_targets(model_config) for leaf in zero_pair(target, rank).values()
    )


@jax.jit
def zeros_like(tree: Tree) -> Tree:
    """Zeros of the same shapes, in one call."""
    return jax.tree.map(jnp.zeros_like, tree)
