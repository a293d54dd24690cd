"""LoRA adapters as pytrees: making them, and collecting several in a bank.

An adapter adds scaling * (x A) B to a linear map (Hu et al. 2021, https://arxiv.org/abs/2106.09685). Ranks are padded
with zeros to a few sizes, so that adapters of different ranks share compiled programs; zeros stay zero under gradients
because the gradient of a column of A is proportional to the same row of B, and vice versa.
"""

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.models.types import MODELS, LoraTarget
from skyrl.types import LoraConfig

if TYPE_CHECKING:
    from skyrl.tx.models.configs import ModelConfig


def padded_rank(rank: int) -> int:
    """The smallest of 8, 32, 128, 512, ... that holds `rank`."""
    padded = 8
    while padded < rank:
        padded *= 4
    return padded


def lora_targets(model_config: "ModelConfig") -> list[LoraTarget]:
    """Every linear map of the configured architecture that an adapter covers."""
    return MODELS[model_config.architecture].lora_targets(model_config)


def is_trained(target: LoraTarget, lora_config: LoraConfig) -> bool:
    """Whether the configuration selects this linear map."""
    return {
        "attn": lora_config.train_attn,
        "mlp": lora_config.train_mlp,
        "unembed": lora_config.train_unembed,
    }[target.group]


def init_adapter(model_config: "ModelConfig", lora_config: LoraConfig, seed: int, rank: int) -> Adapter:
    """A fresh adapter, padded to `rank`: B = 0, and A uniform in +-1 / sqrt(in), the same for every layer.

    That is PEFT's default (Kaiming uniform with a = sqrt 5, which is torch's for `nn.Linear`). Values depend on the
    seed (any integer), the true rank, module and layer only; padding and the choice of other modules change nothing.
    """
    pairs = []
    for target in lora_targets(model_config):
        pair = zero_pair(target, rank)
        if is_trained(target, lora_config):
            bound = 1 / np.sqrt(target.in_features)
            for layer, matrix in enumerate(pair["lora_A"].reshape(-1, target.in_features, rank)):
                stream = np.random.default_rng([seed % 2**64, zlib.crc32(".".join(target.path).encode()), layer])
                draws = stream.random((target.in_features, lora_config.rank), np.float32)
                matrix[:, : lora_config.rank] = np.float32(bound) * (2 * draws - 1)
        pairs.append((target, pair))
    return adapter_of(pairs, lora_config.scaling)


def zero_adapter(model_config: "ModelConfig", rank: int) -> Adapter:
    """An adapter that changes nothing (A = B = 0, scaling 0)."""
    return adapter_of([(target, zero_pair(target, rank)) for target in lora_targets(model_config)], 0.0)


def adapter_of(pairs: Sequence[tuple[LoraTarget, dict[str, np.ndarray]]], scaling: float) -> Adapter:
    """The tree of the given `{"lora_A": [in, rank], "lora_B": [rank, out]}` pairs, on the default device."""
    weights: dict[str, Any] = {}
    for target, pair in pairs:
        node = weights
        for part in target.path[:-1]:
            node = node.setdefault(part, {})
        node[target.path[-1]] = {name: jnp.asarray(matrix, jnp.float32) for name, matrix in pair.items()}
    return Adapter(weights, jnp.asarray(scaling, jnp.float32))


def pair_at(adapter: Adapter, path: Sequence[str]) -> dict[str, jax.Array]:
    """The `{"lora_A", "lora_B"}` pair of one linear map."""
    node = adapter.weights
    for part in path:
        node = node[part]
    return node


def empty_bank(adapter: Adapter, slots: int, unrolled: bool) -> Adapter:
    """A bank of so many slots for adapters of this one's shape. Empty slots change nothing."""

    def widened(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        at = leaf.ndim - (1 if _name(path) == "lora_A" else 2)
        return jnp.zeros((*leaf.shape[:at], slots, *leaf.shape[at:]), leaf.dtype)

    weights = jax.tree_util.tree_map_with_path(widened, adapter.weights)
    if unrolled:
        weights |= {"layers": _by_layer(weights["layers"])}
    return Adapter(weights, jnp.zeros(slots, jnp.float32))


def write_slot(bank: Adapter, slot: int | jax.Array, adapter: Adapter) -> Adapter:
    """The bank with one slot replaced, ranks padded to the bank's. Donate `bank` under jit to do it in place.

    An adapter that is not finite gets a scaling of NaN and weights of 0: rows that use it are NaN, and the products
    of others, which meet all slots, stay as they are.
    """
    leaves = jax.tree.leaves(adapter)
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()
    weights = adapter.weights
    if isinstance(bank.weights["layers"], list):
        weights = weights | {"layers": _by_layer(weights["layers"])}

    def write(path: tuple[Any, ...], leaf: jax.Array, value: jax.Array) -> jax.Array:
        is_a = _name(path) == "lora_A"
        at = leaf.ndim - (2 if is_a else 3)
        room = leaf.shape[-1] if is_a else leaf.shape[-2]
        pad = [(0, 0)] * value.ndim
        pad[-1 if is_a else -2] = (0, room - value.shape[-1 if is_a else -2])
        value = jnp.pad(jnp.where(finite, value, 0.0), pad)
        return jax.lax.dynamic_update_index_in_dim(leaf, value, slot, at)

    return Adapter(
        jax.tree_util.tree_map_with_path(write, bank.weights, weights),
        bank.scaling.at[slot].set(jnp.where(finite, adapter.scaling, jnp.nan)),
    )


def _by_layer(stacked: dict[str, Any]) -> list[dict[str, Any]]:
    leaves, tree = jax.tree.flatten(stacked)
    return [jax.tree.unflatten(tree, [leaf[layer] for leaf in leaves]) for layer in range(len(leaves[0]))]


def _name(path: tuple[Any, ...]) -> str:
    return path[-1].key


def zero_pair(target: LoraTarget, rank: int) -> dict[str, np.ndarray]:
    """Zero matrices of a linear map, stacked over layers where the target is."""
    stack = () if target.layers is None else (target.layers,)
    return {
        "lora_A": np.zeros((*stack, target.in_features, rank), np.float32),
        "lora_B": np.zeros((*stack, rank, target.out_features), np.float32),
    }
