"""LoRA adapters as pytrees: creation of adapters, and banks of several adapters.

An adapter adds scaling * (x A) B to a linear layer (Hu et al. 2021, https://arxiv.org/abs/2106.09685). Ranks are padded
with zeros to a few sizes, so that adapters of different ranks share compiled programs. Zeros stay zero in training
because the gradient of a column of A is proportional to the same row of B, and vice versa.
"""

import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl.tx.design import connectors, parameters
from skyrl.tx.design.connectors import ConnectorTarget
from skyrl.tx.design.parameters import LoraTarget, Place
from skyrl.tx.families import design_of
from skyrl.tx.layers.adapter import Adapter
from skyrl.types import AdapterConfig, LoraConfig

if TYPE_CHECKING:
    from skyrl.tx.models.configs import ModelConfig


Target = LoraTarget | ConnectorTarget
"""A part of the model for which an adapter has parameters."""


def padded_rank(rank: int) -> int:
    """Return the smallest of 8, 32, 128, 512, ... that is at least `rank`."""
    padded = 8
    while padded < rank:
        padded *= 4
    return padded


def lora_targets(model_config: "ModelConfig") -> tuple[LoraTarget, ...]:
    """Return all linear layers of the configured model that an adapter covers."""
    return parameters.lora_targets(design_of(model_config))


def connector_targets(model_config: "ModelConfig") -> tuple[ConnectorTarget, ...]:
    """Return all connectors of the configured model. Empty with one residual stream."""
    return connectors.connector_targets(design_of(model_config), model_config.mhc_expansion_rate)


def all_targets(model_config: "ModelConfig") -> tuple[Target, ...]:
    """Return all parts of the model for which an adapter has parameters."""
    return *lora_targets(model_config), *connector_targets(model_config)


def adapted(target: Target, lora_config: LoraConfig) -> list[tuple[Place, str]]:
    """Return (index, name) of each module that the configuration selects."""
    return [(place, module) for place, module in target.modules if lora_config.selects(module, target.group)]


def init_adapter(model_config: "ModelConfig", lora_config: LoraConfig, seed: int, rank: int) -> Adapter:
    """Create a new adapter, padded to `rank`: B = 0, and A uniform in +-1 / sqrt(in), in every layer and expert.

    That is PEFT's default (Kaiming uniform with a = sqrt 5, as in torch's `nn.Linear`). With init_method=gaussian, A is
    from N(0, 1 / rank^2). Values depend only on the seed (any integer), true rank, module, layer and expert, not on
    padding and other modules. Modules that are not selected have A = B = 0. Connectors are selected by the same names
    and switches; selected ones are trainable, and initially have no effect.
    """
    gaussian = isinstance(lora_config, AdapterConfig) and lora_config.init_method == "gaussian"
    pairs: list[tuple[Target, dict[str, np.ndarray]]] = []
    for target in lora_targets(model_config):
        pair = zero_pair(target, rank)
        bound = np.float32(1 / np.sqrt(target.in_features))
        stream_name, shape = zlib.crc32(".".join(target.path).encode()), (target.in_features, lora_config.rank)
        for place, _ in adapted(target, lora_config):
            stream = np.random.default_rng([seed % 2**64, stream_name, *(place or (0,))])
            pair["lora_A"][place][:, : lora_config.rank] = (
                stream.standard_normal(shape, np.float32) / np.float32(lora_config.rank)
                if gaussian
                else bound * (2 * stream.random(shape, np.float32) - 1)
            )
        pairs.append((target, pair))
    for target, connector in stacked_connectors(model_config, {}):
        for place, _ in adapted(target, lora_config):
            connector["alpha"][place] = 1
        pairs.append((target, connector))
    return adapter_of(pairs, lora_config.scaling)


def zero_adapter(model_config: "ModelConfig", rank: int) -> Adapter:
    """Create an adapter without effect (A = B = 0, scaling 0, no connectors)."""
    pairs = [(target, zero_pair(target, rank)) for target in lora_targets(model_config)]
    return adapter_of([*pairs, *stacked_connectors(model_config, {})], 0.0)


def adapter_of(pairs: Sequence[tuple[Target, dict[str, np.ndarray]]], scaling: float) -> Adapter:
    """Build an adapter from `{"lora_A": [in, rank], "lora_B": [rank, out]}` pairs, on the default device.

    With several residual streams, `pairs` includes the parameters of connectors.
    """
    arrays = [
        (target, {name: jnp.asarray(matrix, jnp.float32) for name, matrix in pair.items()}) for target, pair in pairs
    ]
    return Adapter(_tree(arrays), jnp.asarray(scaling, jnp.float32))


def _tree(pairs: Sequence[tuple[Target, dict[str, Any]]]) -> dict[str, Any]:
    """Build a tree with a value for each target, at its path."""
    tree: dict[str, Any] = {}
    for target, pair in pairs:
        node = tree
        for part in target.path[:-1]:
            node = node.setdefault(part, {})
        node[target.path[-1]] = pair
    return tree


def pair_at(adapter: Adapter, path: Sequence[str]) -> dict[str, jax.Array] | dict[str, np.ndarray]:
    """Return the parameters at a target's path, such as `{"lora_A", "lora_B"}`. On the host if the adapter is there."""
    node = adapter.weights
    for part in path:
        node = node[part]
    return node


@dataclass(frozen=True)
class _Axes:
    """Axes of a matrix in a bank, as negative indices, so that stacked layers make no difference."""

    slot: int
    rank: int | None = None
    """Axis of the rank. None if there is none."""


def _axes(targets: Sequence[Target]) -> dict[str, Any]:
    """Build a tree of axes with the structure of an adapter's weights.

    The matrices of all slots for one linear layer are contiguous, so that one product computes all slots. For experts,
    each slot has separate matrices.
    """
    pairs: list[tuple[Target, dict[str, Any]]] = []
    for target in targets:
        if isinstance(target, ConnectorTarget):
            pairs.append((target, dict.fromkeys(target.shapes, _Axes(-2))))
            continue
        slot_of_a = -2 if target.stack.experts is None else -3
        pairs.append((target, {"lora_A": _Axes(slot_of_a, -1), "lora_B": _Axes(-3, -2)}))
    return _tree(pairs)


def empty_bank(targets: Sequence[Target], adapter: Adapter, slots: int, unrolled: bool) -> Adapter:
    """Create a bank with `slots` slots for adapters shaped like `adapter`. Empty slots have no effect."""

    def widened(axes: _Axes, leaf: jax.Array) -> jax.Array:
        at = leaf.ndim + 1 + axes.slot
        return jnp.zeros((*leaf.shape[:at], slots, *leaf.shape[at:]), leaf.dtype)

    weights = jax.tree.map(widened, _axes(targets), adapter.weights)
    return Adapter(_by_layer(targets, weights) if unrolled else weights, jnp.zeros(slots, jnp.float32))


def write_slot(targets: Sequence[Target], bank: Adapter, slot: int | jax.Array, adapter: Adapter) -> Adapter:
    """Write an adapter, padded to the bank's rank, to one slot. Donate `bank` under jit to update it in place.

    A non-finite adapter is stored with a scaling of NaN and weights of 0. So rows that use it become NaN. Other rows
    are not affected, although their products include all slots.
    """
    leaves = jax.tree.leaves(adapter)
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()
    weights, axes = adapter.weights, _axes(targets)
    if any(isinstance(part, list) for part in bank.weights.values()):
        weights = _by_layer(targets, weights)
        axes |= {name: [axes[name]] * len(part) for name, part in bank.weights.items() if isinstance(part, list)}

    def write(axes: _Axes, leaf: jax.Array, value: jax.Array) -> jax.Array:
        pad = [(0, 0)] * value.ndim
        if axes.rank is not None:
            pad[axes.rank] = (0, leaf.shape[axes.rank] - value.shape[axes.rank])
        value = jnp.pad(jnp.where(finite, value, 0.0), pad)
        return jax.lax.dynamic_update_index_in_dim(leaf, value, slot, leaf.ndim + axes.slot)

    return Adapter(
        jax.tree.map(write, axes, bank.weights, weights),
        bank.scaling.at[slot].set(jnp.where(finite, adapter.scaling, jnp.nan)),
    )


def _by_layer(targets: Sequence[Target], weights: dict[str, Any]) -> dict[str, Any]:
    """Replace each group of stacked layers in the tree by a list of layers."""
    groups = {target.path[0]: len(target.stack.layers) for target in targets if target.stack.layers is not None}
    lists = {
        group: [jax.tree.map(lambda leaf, at=layer: leaf[at], weights[group]) for layer in range(count)]
        for group, count in groups.items()
    }
    return weights | lists


def stacked_pairs(
    targets: Iterable[LoraTarget], matrices: Mapping[str, tuple[np.ndarray, np.ndarray]], rank: int
) -> list[tuple[LoraTarget, dict[str, np.ndarray]]]:
    """Build the pairs of all targets, padded to `rank`, from each module's A `[in, rank]` and B `[rank, out]`.

    Modules that `matrices` lacks get zeros.
    """
    pairs = []
    for target in targets:
        pair = zero_pair(target, rank)
        for place, module in target.modules:
            if module in matrices:
                a, b = matrices[module]
                pair["lora_A"][place][:, : a.shape[1]] = a
                pair["lora_B"][place][: b.shape[0]] = b
        pairs.append((target, pair))
    return pairs


def zero_pair(target: LoraTarget, rank: int) -> dict[str, np.ndarray]:
    """Return zero matrices for a linear layer, stacked over layers and experts like the target."""
    return {
        "lora_A": np.zeros((*target.stack.shape, target.in_features, rank), np.float32),
        "lora_B": np.zeros((*target.stack.shape, rank, target.out_features), np.float32),
    }


def stacked_connectors(
    model_config: "ModelConfig", tensors: Mapping[str, np.ndarray]
) -> list[tuple[ConnectorTarget, dict[str, np.ndarray]]]:
    """Build the parameters of all connectors from tensors `<connector>.phi` and so on. Missing ones are zero."""
    stacks = []
    for target in connector_targets(model_config):
        stack = {name: np.zeros((*target.stack.shape, *shape), np.float32) for name, shape in target.shapes.items()}
        for (place, module), name in itertools.product(target.modules, stack):
            if f"{module}.{name}" in tensors:
                stack[name][place] = tensors[f"{module}.{name}"]
        stacks.append((target, stack))
    return stacks
