"""Trainable state of models. Each model is one pytree, and tenants share nothing.

A model owns its adapter (or its own base weights), its gradient sums and its Adam moments, all float32. Arrays are
immutable and replaced as a whole, so a checkpoint or a published version can refer to the current arrays.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl.backends.common.memory_plan import COPIES, NEW_IN_A_STEP
from skyrl.backends.common.models.kind import HEAD_STREAM, VALUE_HEAD, Kind
from skyrl.backends.common.offload import ModelInfo
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.lora import init_adapter, lora_targets, padded_rank, stacked_connectors, zero_adapter, zero_pair
from skyrl.types import LoraConfig

if TYPE_CHECKING:
    from skyrl.tx.models.configs import ModelConfig

Tree = dict[str, Any]
"""Arrays in the structure of `Adapter.weights`."""


@dataclass
class ModelState:
    """One model, as managed by `ModelOffload`. Gradient sums are None until a pass adds to them."""

    lora_config: LoraConfig
    adapter: Adapter
    first_moment: Tree
    second_moment: Tree
    step: int = 0
    """Number of optimizer steps taken."""
    gradient_sums: Tree | None = None
    sequences: int | None = 0
    """Number of sequences in the gradient sums; None: unknown."""

    @classmethod
    def fresh(cls, lora_config: LoraConfig, adapter: Adapter) -> "ModelState":
        """Create a new model, without optimizer steps."""
        return cls(lora_config, adapter, zeros_like(adapter.weights), zeros_like(adapter.weights))

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays, as a pytree."""
        return self.adapter, self.first_moment, self.second_moment, self.gradient_sums

    def with_arrays(self, arrays: tuple[Any, ...]) -> "ModelState":
        """The same model with other arrays, such as copies in another memory."""
        adapter, first, second, sums = arrays
        return ModelState(self.lora_config, adapter, first, second, self.step, sums, self.sequences)

    def to_host(self) -> "ModelState":
        """The same model with its arrays in host memory."""
        return self.with_arrays(jax.device_get(self.arrays))

    def to_device(self) -> "ModelState":
        """The same model with its arrays on the device."""
        return self.with_arrays(jax.device_put(self.arrays))

    def drop_sums(self) -> None:
        """Clear the gradient sums."""
        self.gradient_sums, self.sequences = None, 0

    @property
    def info(self) -> ModelInfo:
        """Facts about the model that are known while it is on disk, too."""
        return ModelInfo(self.lora_config, self.step, self.value_head)

    @property
    def value_head(self) -> bool:
        """True for a critic."""
        return self.adapter.value_head is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, including space for gradient sums.

        For a model with its own base weights, this includes the memory of an optimizer step, because few such models
        fit.
        """
        return (COPIES if self.adapter.own_base is None else COPIES + NEW_IN_A_STEP) * bytes_of(self.adapter)


def bytes_of(adapter: Adapter) -> int:
    """Bytes of an adapter's weights."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(adapter.weights))


def model_bytes(model_config: "ModelConfig", base: Any, kind: "Kind") -> int:
    """`ModelState.nbytes` of a new model of this kind. `base` has the base model's weights."""
    head = 4 * model_config.hidden_size if kind.value_head else 0
    if kind.lora_config.rank == 0:
        return (COPIES + NEW_IN_A_STEP) * (head + sum(4 * leaf.size for leaf in jax.tree.leaves(base)))
    rank, targets = padded_rank(kind.lora_config.rank), lora_targets(model_config)
    pairs = sum(leaf.nbytes for target in targets for leaf in zero_pair(target, rank).values())
    connectors = sum(leaf.nbytes for _, stack in stacked_connectors(model_config, {}) for leaf in stack.values())
    return COPIES * (head + pairs + connectors)


def fresh_adapter(
    model_config: "ModelConfig", base: Any, kind: Kind, seed: int, value_head: np.ndarray | None
) -> Adapter:
    """Create weights of a new model: an adapter without effect, or a float32 copy of the base model.

    Args:
        model_config: Configuration of the base model.
        base: Weights of the base model.
        kind: Kind of the model.
        seed: Seed of the adapter and the value head.
        value_head: float32 `[hidden]`. None: drawn from N(0, 1 / (hidden + 1)), which gives small values.
    """
    config = kind.lora_config
    if config.rank == 0:
        own = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), base)
        adapter = Adapter({"base": own}, jnp.asarray(config.scaling, jnp.float32))
    else:
        adapter = init_adapter(model_config, config, seed, padded_rank(config.rank))
    if not kind.value_head:
        return adapter
    if value_head is None:
        hidden = model_config.hidden_size
        value_head = np.random.default_rng([seed % 2**64, HEAD_STREAM]).normal(0, 1 / (hidden + 1), hidden)
    return adapter._replace(weights=adapter.weights | {VALUE_HEAD: jnp.asarray(value_head, jnp.float32)})


def empty_adapter(model_config: "ModelConfig", base: Any, kind: Kind) -> Adapter:
    """An adapter with the shapes of a model of this kind, for comparison with stored tensors."""
    if kind.lora_config.rank == 0:
        adapter = Adapter({"base": base}, jnp.float32(1))
    else:
        adapter = zero_adapter(model_config, padded_rank(kind.lora_config.rank))
    head = {"value_head": jnp.zeros(model_config.hidden_size)} if kind.value_head else {}
    return adapter._replace(weights=adapter.weights | head)


def in_types_of(base: Any, own: Any) -> Any:
    """Cast the parameters `own` to the dtypes of the base model's parameters, in which they are used."""
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), own, base)


@jax.jit
def zeros_like(tree: Tree) -> Tree:
    """Zeros of the same shapes, in one call."""
    return jax.tree.map(jnp.zeros_like, tree)
