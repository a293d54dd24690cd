"""Conversion between pytrees and the tensors of training files.

Pytrees have padded ranks and stacks of layers and experts. Files have neither
(`skyrl.backends.common.models.training_files`), except files of format 1, which hold the arrays of a pytree unchanged.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from skyrl.backends.common.models.kind import VALUE_HEAD, Kind
from skyrl.backends.jax.models.state import Tree, empty_adapter
from skyrl.tx.design.parameters import parameters
from skyrl.tx.families import design_of
from skyrl.tx.io.export import named_tensors
from skyrl.tx.io.host_arrays import on_host, tensor_of
from skyrl.tx.io.weights import state_of
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.lora import (
    adapted,
    adapter_of,
    connector_targets,
    lora_targets,
    padded_rank,
    pair_at,
    stacked_connectors,
    stacked_pairs,
)
from skyrl.utils.files.stored_tensors import StoredArrays
from skyrl.utils.files.tensor_file import Tensor

if TYPE_CHECKING:
    from skyrl.tx.models.configs import ModelConfig

Shapes = dict[str, tuple[int, ...]]
FLOAT32 = np.dtype(np.float32)


def named(model_config: "ModelConfig", kind: Kind, tree: Tree) -> dict[str, Tensor]:
    """Tensors of a buffer, by name."""
    head = {VALUE_HEAD: tensor_of(tree[VALUE_HEAD])} if kind.value_head else {}
    if kind.is_whole:
        return named_tensors(parameters(design_of(model_config)), tree["base"]) | head
    rank, adapter, tensors = kind.lora_config.rank, Adapter(tree, jnp.float32(1)), {}
    for target in connector_targets(model_config):
        for name, array in pair_at(adapter, target.path).items():
            for place, module in adapted(target, kind.lora_config):
                tensors[f"{module}.{name}"] = Tensor(
                    target.shapes[name], FLOAT32, lambda array=array, place=place: on_host(array, place)
                )
    for target in lora_targets(model_config):
        pair = pair_at(adapter, target.path)
        a, b = pair["lora_A"], pair["lora_B"]
        for place, module in adapted(target, kind.lora_config):
            tensors[f"{module}.lora_A"] = Tensor(
                (target.in_features, rank), FLOAT32, lambda a=a, place=place: on_host(a, place)[:, :rank]
            )
            tensors[f"{module}.lora_B"] = Tensor(
                (rank, target.out_features), FLOAT32, lambda b=b, place=place: on_host(b, place)[:rank]
            )
    return tensors | head


def shapes(model_config: "ModelConfig", base: Any, kind: Kind) -> Shapes:
    """Shapes of the tensors of a buffer. `base` has the base model's weights."""
    tree = empty_adapter(model_config, base, kind).weights
    return {name: tensor.shape for name, tensor in named(model_config, kind, tree).items()}


def tree_of(model_config: "ModelConfig", base: Any, kind: Kind, tensors: StoredArrays, shardings: Any = None) -> Tree:
    """The inverse of `named` for tensors with checked shapes. Arrays are on the device.

    Args:
        model_config: Configuration of the base model.
        base: Weights of the base model.
        kind: Kind of the model.
        tensors: Tensors by name. Of a model's own weights, each part reads only its rows.
        shardings: Shardings of a model's own weights; None: one device has all.
    """
    head: Tree = {VALUE_HEAD: jnp.asarray(tensors[VALUE_HEAD])} if kind.value_head else {}
    if kind.is_whole:
        table = {param.path: param for param in parameters(design_of(model_config))}

        def take(name: str, shape: tuple[int, ...], turned: bool, index: tuple[slice, ...]) -> np.ndarray:
            axis = -1 if turned and len(shape) == 2 else 0  # of the parameter, for the first one of the stored tensor
            first, last, _ = index[axis].indices(shape[axis])
            others = list(index)
            others[axis] = slice(None)
            return _turned(tensors.rows(name, first, last), turned)[tuple(others)]

        return {"base": state_of(base, table, take, FLOAT32, shardings)} | head
    names = [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")]
    matrices = {module: (tensors[f"{module}.lora_A"], tensors[f"{module}.lora_B"]) for module in names}
    pairs = stacked_pairs(lora_targets(model_config), matrices, padded_rank(kind.lora_config.rank))
    return adapter_of([*pairs, *stacked_connectors(model_config, tensors)], 1.0).weights | head


def _turned(tensor: np.ndarray, turned: bool) -> np.ndarray:
    return np.swapaxes(tensor, -1, -2) if turned else tensor


# -- format 1 ---------------------------------------------------------------------------------------------------------


def is_stacked(tensors: Mapping[str, np.ndarray]) -> bool:
    """Return True for arrays of a pytree (format 1), whose names are paths."""
    return any("/" in name for name in tensors)


def stacked_shapes(model_config: "ModelConfig", base: Any, kind: Kind) -> Shapes:
    """Shapes of the arrays of a buffer in format 1."""
    tree = empty_adapter(model_config, base, kind).weights
    return dict(_in_format_1(name, array.shape) for name, array in _flatten(tree).items())


def tree_of_stacked(model_config: "ModelConfig", base: Any, kind: Kind, tensors: Mapping[str, np.ndarray]) -> Tree:
    """Pytree on the device from the tensors of a buffer in format 1, with checked shapes."""
    tree: Tree = {} if kind.is_whole else adapter_of(stacked_connectors(model_config, {}), 1.0).weights
    for path, value in tensors.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = jnp.asarray(value)
    if kind.is_whole:
        flat = []
        for path, variable in nnx.to_flat_state(base):
            own = ".".join(map(str, path))
            name, _ = _in_format_1(own, variable.shape)
            stored = tree["base"][name]
            flat.append((path, variable.replace(stored if name == own else jnp.swapaxes(stored, -1, -2))))
        tree["base"] = nnx.from_flat_state(flat)
    return tree


def _in_format_1(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Name and shape of an array in format 1, where weights of linear layers are transposed "kernels"."""
    if not name.endswith(".weight"):
        return name, shape
    return name.removesuffix("weight") + "kernel", (*shape[:-2], shape[-1], shape[-2])


def _flatten(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """Arrays of a pytree by their paths."""
    flat: dict[str, Any] = {}
    for name, child in tree.items():
        if isinstance(child, nnx.State):
            child = {".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(child)}
        flat |= _flatten(child, f"{prefix}{name}/") if isinstance(child, dict) else {f"{prefix}{name}": child}
    return flat
