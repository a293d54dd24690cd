"""Checkpoint and snapshot folders: training state as safetensors and JSON, sampler weights in PEFT layout, or those of
a model that is trained as a whole in Hugging Face's.

Both kinds are self-describing and committed by a hash manifest (`skyrl.utils.atomic_folders`). `pack_*` take references
to immutable arrays, so they may run in a background thread while training goes on.
"""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load, save

from skyrl.backends.jax.models.state import Kind, ModelState, Tree, in_types_of
from skyrl.errors import RequestError, StorageError
from skyrl.tx.io.export import WEIGHTS
from skyrl.tx.io.peft import adapter_from_peft, adapter_to_peft
from skyrl.tx.io.tensor_file import Tensor, tensor_file
from skyrl.tx.io.weights import with_weights
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.lora import padded_rank
from skyrl.tx.models.types import ModelForCausalLM
from skyrl.types import LoraConfig
from skyrl.utils.atomic_folders import Content, open_folder, read_folder

TRAINING_TENSORS, TRAINING_STATE = "training_state.safetensors", "training_state.json"
PEFT_TENSORS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def pack_training(state: ModelState, base_model: str) -> dict[str, Content]:
    """Files of a training checkpoint or snapshot: weights, moments, step, LoRA configuration, gradient sums if any.

    Tensors are copied one by one, as they are written.
    """
    parts = {"weights": state.adapter.weights, "first_moment": state.first_moment, "second_moment": state.second_moment}
    if state.gradient_sums is not None:
        parts["gradient_sums"] = state.gradient_sums
    header = {
        "format": 1,
        "base_model": base_model,
        "step": state.step,
        "lora_config": state.lora_config.model_dump(),
        "value_head": state.value_head,
    }
    tensors = {name: Tensor.of(array) for name, array in _flatten(parts).items()}
    return {TRAINING_TENSORS: tensor_file(tensors), TRAINING_STATE: json.dumps(header, indent=1).encode()}


def pack_sampler(adapter: Adapter, lora_config: LoraConfig, model_config: Any) -> dict[str, Content]:
    """Files of a sampler checkpoint, as `peft.PeftModel.from_pretrained` and vLLM read them."""
    tensors, config = adapter_to_peft(adapter, lora_config, model_config)
    return {PEFT_TENSORS: save(tensors), PEFT_CONFIG: json.dumps(config, indent=1).encode()}


def load_training(
    path: str, like: Callable[[Kind], Adapter], *, load_optimizer: bool = True, digest: str | None = None
) -> ModelState:
    """The model that `pack_training` stored at `path`.

    Args:
        path: Folder of a checkpoint or snapshot.
        like: An adapter of the loaded base model for what is stored, to compare shapes with. It may raise
            `RequestError` for what is not wanted.
        load_optimizer: False starts with zero moments at step 0.
        digest: What its manifest must hash to, where that is known.

    Raises:
        StorageError: Missing or damaged files.
        RequestError: The checkpoint belongs to another base model.
    """
    files = read_folder(path, digest)
    header = _header(files, path)
    kind = _kind(header)
    lora_config, expected = kind.lora_config, like(kind).weights
    parts = _unflatten(load(files[TRAINING_TENSORS]))
    if _shapes(_flatten(parts["weights"])) != _shapes(_flatten(expected)):
        raise RequestError(
            f"path={path}: this checkpoint was trained on base model {header['base_model']!r}, whose layers have other "
            "shapes than the one served here; serve that base model to load it"
        )
    parts = {name: _on_device(tree, expected) for name, tree in parts.items()}
    scaling = jnp.asarray(lora_config.scaling, jnp.float32)
    state = ModelState.fresh(lora_config, Adapter(parts["weights"], scaling))
    if load_optimizer:
        state.first_moment = parts["first_moment"]
        state.second_moment = parts["second_moment"]
        state.step = header["step"]
    state.gradient_sums = parts.get("gradient_sums")
    return state


def stored_kind(path: str, digest: str | None = None) -> Kind:
    """What kind of model `pack_training` stored at `path`, of which nothing else is read.

    Raises:
        StorageError: Missing or damaged files.
        RequestError: It is no training checkpoint.
    """
    try:
        with open_folder(path) as files:
            header = next(file.reader.read() for file in files if file.name == TRAINING_STATE)
        return _kind(_header({TRAINING_STATE: header}, path))
    except (StorageError, OSError, ValueError, KeyError, TypeError, StopIteration):
        files = read_folder(path, digest)  # says what is wrong, and moves what is damaged aside
        return _kind(_header(files, path))


def load_version(path: str, model: ModelForCausalLM, max_rank: int) -> tuple[Adapter, LoraConfig]:
    """Weights of a sampler checkpoint, or those of a training checkpoint, to sample from `model`, the base model.

    Raises:
        StorageError: Missing or damaged files.
        RequestError: The adapter does not fit the served base model or `max_rank`.
    """
    files = read_folder(path)
    if PEFT_CONFIG in files:
        config = json.loads(files[PEFT_CONFIG])
        rank = _served_rank(int(config["r"]), max_rank, path)
        return adapter_from_peft(load(files[PEFT_TENSORS]), config, model.config, rank)
    if WEIGHTS in files:
        return Adapter({"base": _whole_model(files, model)}, jnp.float32(1)), LoraConfig(rank=0)
    kind = _kind(_header(files, path))
    _served_rank(kind.lora_config.rank, max_rank, path)
    base = nnx.split(model)[1]
    weights = _on_device(_unflatten(load(files[TRAINING_TENSORS]))["weights"], {"base": base})
    weights.pop("value_head", None)
    if "base" in weights:
        weights["base"] = in_types_of(base, weights["base"])
    return Adapter(weights, jnp.asarray(kind.lora_config.scaling, jnp.float32)), kind.lora_config


def _whole_model(files: dict[str, bytes], model: ModelForCausalLM) -> Any:
    """Parameters of a model in Hugging Face format, in the structure and the types of the base model's."""
    with TemporaryDirectory() as folder:
        Path(folder, WEIGHTS).write_bytes(files[WEIGHTS])
        return nnx.split(with_weights(model, folder))[1]


def _served_rank(rank: int, max_rank: int, path: str) -> int:
    if rank > max_rank:
        raise RequestError(f"path={path}: rank {rank} is above max_lora_rank={max_rank}; start the server with more")
    return padded_rank(rank)


def _kind(header: dict[str, Any]) -> Kind:
    return Kind(LoraConfig(**header["lora_config"]), header.get("value_head", False))


def _header(files: dict[str, bytes], path: str) -> dict[str, Any]:
    if TRAINING_STATE not in files:
        raise RequestError(f"path={path} is no training checkpoint; use one that save_weights (save_state) made")
    header = json.loads(files[TRAINING_STATE])
    if header["format"] != 1:
        raise StorageError(f"{path} has format {header['format']}; this version reads format 1")
    return header


def _flatten(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """The tree's arrays, wherever they are, by their paths."""
    flat: dict[str, Any] = {}
    for name, child in tree.items():
        path, child = f"{prefix}{name}", _named(child) if isinstance(child, nnx.State) else child
        flat |= _flatten(child, f"{path}/") if isinstance(child, dict) else {path: child}
    return flat


def _shapes(flat: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in flat.items()}


def _named(state: nnx.State) -> Tree:
    return {".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(state)}


def _unflatten(flat: dict[str, np.ndarray]) -> Tree:
    tree: Tree = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def _on_device(tree: Tree, like: Tree) -> Tree:
    """The tree as arrays of the device, parameters of the base model in their structure."""
    tree = jax.tree.map(jnp.asarray, tree)
    if "base" in tree:
        stored = nnx.to_flat_state(like["base"])
        flat = [(path, variable.replace(tree["base"][".".join(map(str, path))])) for path, variable in stored]
        tree["base"] = nnx.from_flat_state(flat)
    return tree
