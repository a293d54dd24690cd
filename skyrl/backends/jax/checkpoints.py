"""Checkpoint and snapshot folders: training state as safetensors and JSON, sampler weights in PEFT layout.

Both kinds are self-describing and committed by a hash manifest (`skyrl.utils.storage`). `pack_*` take references to
immutable arrays, so they may run in a background thread while training goes on.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load, save

from skyrl.backends.jax.adapters import ModelState, Tree
from skyrl.errors import RequestError, StorageError
from skyrl.tx.lora import padded_rank
from skyrl.tx.models.types import Adapter
from skyrl.tx.peft import adapter_from_peft, adapter_to_peft
from skyrl.types import LoraConfig
from skyrl.utils.storage import open_folder, read_folder

TRAINING_TENSORS, TRAINING_STATE = "training_state.safetensors", "training_state.json"
PEFT_TENSORS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def pack_training(state: ModelState, base_model: str) -> dict[str, bytes]:
    """Files of a training checkpoint or snapshot: weights, moments, step, LoRA configuration, gradient sums if any."""
    parts = {"weights": state.adapter.weights, "first_moment": state.first_moment, "second_moment": state.second_moment}
    if state.gradient_sums is not None:
        parts["gradient_sums"] = state.gradient_sums
    header = {
        "format": 1,
        "base_model": base_model,
        "step": state.step,
        "lora_config": state.lora_config.model_dump(),
    }
    return {TRAINING_TENSORS: save(_flatten(parts)), TRAINING_STATE: json.dumps(header, indent=1).encode()}


def pack_sampler(adapter: Adapter, lora_config: LoraConfig, model_config: Any) -> dict[str, bytes]:
    """Files of a sampler checkpoint, as `peft.PeftModel.from_pretrained` and vLLM read them."""
    tensors, config = adapter_to_peft(adapter, lora_config, model_config)
    return {PEFT_TENSORS: save(tensors), PEFT_CONFIG: json.dumps(config, indent=1).encode()}


def load_training(
    path: str, like: Callable[[LoraConfig], Adapter], *, load_optimizer: bool = True, digest: str | None = None
) -> ModelState:
    """The model that `pack_training` stored at `path`.

    Args:
        path: Folder of a checkpoint or snapshot.
        like: An adapter of the loaded base model for a LoRA configuration, to compare shapes with. It may raise
            `RequestError` for a configuration that is not wanted.
        load_optimizer: False starts with zero moments at step 0.
        digest: What its manifest must hash to, where that is known.

    Raises:
        StorageError: Missing or damaged files.
        RequestError: The checkpoint belongs to another base model.
    """
    files = read_folder(path, digest)
    header = _header(files, path)
    lora_config = LoraConfig(**header["lora_config"])
    expected = like(lora_config)
    parts = _unflatten(load(files[TRAINING_TENSORS]))
    if jax.tree.map(np.shape, parts["weights"]) != jax.tree.map(np.shape, expected.weights):
        raise RequestError(
            f"path={path}: this checkpoint was trained on base model {header['base_model']!r}, whose layers have other "
            "shapes than the one served here; serve that base model to load it"
        )
    scaling = jnp.asarray(lora_config.alpha / lora_config.rank, jnp.float32)
    state = ModelState.fresh(lora_config, Adapter(_on_device(parts["weights"]), scaling))
    if load_optimizer:
        state.first_moment = _on_device(parts["first_moment"])
        state.second_moment = _on_device(parts["second_moment"])
        state.step = header["step"]
    if "gradient_sums" in parts:
        state.gradient_sums = _on_device(parts["gradient_sums"])
    return state


def stored_config(path: str, digest: str | None = None) -> LoraConfig:
    """The LoRA configuration of what `pack_training` stored at `path`, of which nothing else is read.

    Raises:
        StorageError: Missing or damaged files.
        RequestError: It is no training checkpoint.
    """
    try:
        with open_folder(path) as files:
            header = next(file.reader.read() for file in files if file.name == TRAINING_STATE)
        return _lora_config({TRAINING_STATE: header}, path)
    except (StorageError, OSError, ValueError, KeyError, TypeError, StopIteration):
        return _lora_config(read_folder(path, digest), path)  # says what is wrong, and moves what is damaged aside


def load_version(path: str, model_config: Any, max_rank: int) -> tuple[Adapter, LoraConfig]:
    """Weights of a sampler checkpoint, or those of a training checkpoint, to sample from.

    Raises:
        StorageError: Missing or damaged files.
        RequestError: The adapter does not fit the served base model or `max_rank`.
    """
    files = read_folder(path)
    if PEFT_CONFIG in files:
        config = json.loads(files[PEFT_CONFIG])
        rank = _served_rank(int(config["r"]), max_rank, path)
        return adapter_from_peft(load(files[PEFT_TENSORS]), config, model_config, rank)
    lora_config = _lora_config(files, path)
    _served_rank(lora_config.rank, max_rank, path)
    weights = _unflatten(load(files[TRAINING_TENSORS]))["weights"]
    scaling = jnp.asarray(lora_config.alpha / lora_config.rank, jnp.float32)
    return Adapter(_on_device(weights), scaling), lora_config


def _served_rank(rank: int, max_rank: int, path: str) -> int:
    if rank > max_rank:
        raise RequestError(f"path={path}: rank {rank} is above max_lora_rank={max_rank}; start the server with more")
    return padded_rank(rank)


def _lora_config(files: dict[str, bytes], path: str) -> LoraConfig:
    return LoraConfig(**_header(files, path)["lora_config"])


def _header(files: dict[str, bytes], path: str) -> dict[str, Any]:
    if TRAINING_STATE not in files:
        raise RequestError(f"path={path} is no training checkpoint; use one that save_weights (save_state) made")
    header = json.loads(files[TRAINING_STATE])
    if header["format"] != 1:
        raise StorageError(f"{path} has format {header['format']}; this version reads format 1")
    return header


def _flatten(tree: Tree, prefix: str = "") -> dict[str, np.ndarray]:
    flat: dict[str, np.ndarray] = {}
    for name, child in tree.items():
        path = f"{prefix}{name}"
        flat |= _flatten(child, f"{path}/") if isinstance(child, dict) else {path: np.asarray(child)}
    return flat


def _unflatten(flat: dict[str, np.ndarray]) -> Tree:
    tree: Tree = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def _on_device(tree: Tree) -> Tree:
    return jax.tree.map(jnp.asarray, tree)
