"""The trainable state of models: one pytree each, nothing shared between tenants.

A model owns its adapter, its gradient sums and its Adam moments, all float32. Arrays are immutable and replaced as a
whole, so a checkpoint or a published version is a reference to the arrays of that moment.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from skyrl.tx.models.types import Adapter
from skyrl.types import LoraConfig

Tree = dict[str, Any]
"""Arrays in the structure of `Adapter.weights`."""


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

    def add_gradients(self, gradients: Tree) -> None:
        """Add one request's gradients to the sums. Waits for the result, so that a failure shows before it is kept."""
        if self.gradient_sums is not None:
            gradients = jax.block_until_ready(_add(self.gradient_sums, gradients))
        self.gradient_sums = gradients


def zeros_like(tree: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, tree)


@jax.jit
def _add(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(jnp.add, a, b)
