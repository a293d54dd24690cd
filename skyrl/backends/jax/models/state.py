"""Trainable state of models. Each model is one pytree, and tenants share nothing.

A model owns its adapter (or its own base weights), its gradient sums and its Adam moments, all float32. Arrays are
immutable and replaced as a whole, so a checkpoint or a published version can refer to the current arrays.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl.backends.common.memory_plan import COPIES, NEW_IN_A_STEP
from skyrl.backends.common.models.kind import HEAD_STREAM, VALUE_HEAD, Kind
from skyrl.backends.common.offload import ModelInfo
from skyrl.backends.jax.layout import Layout
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
    shardings: Adapter | None = None
    """Shardings of the adapter's arrays, while they are in host memory. None: one device has all arrays."""

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
        return ModelState(self.lora_config, adapter, first, second, self.step, sums, self.sequences, self.shardings)

    def to_host(self) -> "ModelState":
        """The same model with its arrays in host memory."""
        spread = any(len(leaf.devices()) > 1 for leaf in jax.tree.leaves(self.adapter))
        moved = self.with_arrays(jax.device_get(self.arrays))
        moved.shardings = jax.tree.map(lambda leaf: leaf.sharding, self.adapter) if spread else None
        return moved

    def to_device(self) -> "ModelState":
        """The same model with its arrays on the device, or on the devices from which they came."""
        own = self.shardings
        if own is None:
            return self.with_arrays(jax.device_put(self.arrays))
        sums = None if self.gradient_sums is None else own.weights
        return self.with_arrays(jax.device_put(self.arrays, (own, own.weights, own.weights, sums)))

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

    @property
    def host_nbytes(self) -> int:
        """Bytes of all arrays in host memory, for one device."""
        return COPIES * bytes_of(self.adapter)


def bytes_of(adapter: Adapter) -> int:
    """Bytes of an adapter's weights, on one device or in host memory."""
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(adapter.weights))


def _bytes(leaf: Any) -> int:
    if not isinstance(leaf, jax.Array):
        return leaf.nbytes
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def model_bytes(model_config: "ModelConfig", base: Any, kind: "Kind", layout: Layout) -> int:
    """`ModelState.nbytes` of a new model of this kind. `base` has the base model's weights."""
    head = 4 * model_config.hidden_size if kind.value_head else 0
    if kind.lora_config.rank == 0:
        own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), base)
        return (COPIES + NEW_IN_A_STEP) * (head + layout.nbytes(own))
    rank, targets = padded_rank(kind.lora_config.rank), lora_targets(model_config)
    pairs = sum(layout.nbytes(_at(target.path, zero_pair(target, rank))) for target in targets)
    connectors = sum(leaf.nbytes for _, stack in stacked_connectors(model_config, {}) for leaf in stack.values())
    return COPIES * (head + pairs + connectors)


def _at(path: tuple[str, ...], pair: dict[str, np.ndarray]) -> Tree:
    """A tree with one pair, at its path."""
    return reduce(lambda tree, name: {name: tree}, reversed(path), pair)


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


def zeros_like(tree: Tree) -> Tree:
    """Zeros of the same shapes in the same places, in one call."""
    leaves, structure = jax.tree.flatten(tree)
    spread = any(isinstance(leaf, jax.Array) and len(leaf.devices()) > 1 for leaf in leaves)
    own = tuple(leaf.sharding for leaf in leaves) if spread else None
    return jax.tree.unflatten(structure, _zeros(own)(leaves))


@lru_cache(maxsize=64)
def _zeros(shardings: tuple[Any, ...] | None) -> Callable[[list[Any]], list[jax.Array]]:
    placed: dict[str, Any] = {} if shardings is None else {"out_shardings": list(shardings)}
    return jax.jit(lambda leaves: list(map(jnp.zeros_like, leaves)), **placed)
