"""Files of models on JAX: training state as safetensors and JSON, sampler weights in PEFT layout, or those of a model
that is trained as a whole in Hugging Face's.

They take references to immutable arrays, so they may be written in a background thread while training goes on.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load, save

from skyrl.backends.common.models.checkpoint_folder import (
    PEFT_CONFIG,
    PEFT_TENSORS,
    TRAINING_STATE,
    TRAINING_TENSORS,
    check_served_rank,
    header_of,
    holds_weights_alone,
    kind_of,
    pack_header,
    stored_sequences,
)
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.common.models.store import ModelFormat
from skyrl.backends.jax.models.state import ModelState, Tree, bytes_of, empty_adapter, in_types_of
from skyrl.errors import RequestError
from skyrl.tx.io.export import model_files
from skyrl.tx.io.host_arrays import tensor_of
from skyrl.tx.io.peft import adapter_from_peft, adapter_to_peft
from skyrl.tx.io.weights import with_weights
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.lora import padded_rank
from skyrl.tx.models.decoder import Decoder
from skyrl.types import LoraConfig
from skyrl.utils.adapters.plain import rank_of
from skyrl.utils.files.atomic_folders import Content, read_folder
from skyrl.utils.files.hf_files import WEIGHTS
from skyrl.utils.files.tensor_file import read_tensors, tensor_file


@dataclass(frozen=True, kw_only=True)
class JaxFormat(ModelFormat[ModelState, Adapter]):
    """`ModelFormat` of trees of arrays."""

    base_model: str
    """Name of the base model in checkpoints."""
    folder: Path
    """Its files."""
    model: Decoder
    """The base model."""
    base: Any
    """Parameters of the split NNX model."""
    value_head: str
    """An exported critic's tensor is `<value_head>.weight`."""
    max_lora_rank: int
    """Largest rank that is sampled."""

    def weights_bytes(self, state: ModelState) -> int:
        return bytes_of(state.adapter)

    def version_bytes(self, version: Adapter) -> int:
        return bytes_of(version)

    def pack_training(self, state: ModelState) -> dict[str, Content]:
        return pack_training(state, self.base_model)

    def load_training(
        self, path: str, check: Callable[[Kind], None], *, load_optimizer: bool = True, digest: str | None = None
    ) -> ModelState:
        files = read_folder(path, digest)
        header = header_of(files, path)
        kind = kind_of(header)
        check(kind)
        if holds_weights_alone(files, path, load_optimizer):
            config, rank = json.loads(files[PEFT_CONFIG]), padded_rank(kind.lora_config.rank)
            adapter, _ = adapter_from_peft(read_tensors(files[PEFT_TENSORS]), config, self.model.config, rank)
            return ModelState.fresh(kind.lora_config, adapter)
        expected = empty_adapter(self.model.config, self.base, kind).weights
        parts = _unflatten(load(files[TRAINING_TENSORS]))
        if _shapes(_flatten(parts["weights"])) != _shapes(_flatten(expected)):
            raise RequestError(
                f"path={path}: this checkpoint was trained on base model {header['base_model']!r}, whose layers have "
                "other shapes than the one served here; serve that base model to load it"
            )
        parts = {name: _on_device(tree, expected) for name, tree in parts.items()}
        scaling = jnp.asarray(kind.lora_config.scaling, jnp.float32)
        state = ModelState.fresh(kind.lora_config, Adapter(parts["weights"], scaling))
        if load_optimizer:
            state.first_moment = parts["first_moment"]
            state.second_moment = parts["second_moment"]
            state.step = header["step"]
        if "gradient_sums" in parts:
            state.gradient_sums, state.sequences = parts["gradient_sums"], stored_sequences(header)
        return state

    def version_of(self, state: ModelState) -> Adapter:
        own = state.adapter.own_base
        if own is None:
            return state.adapter
        return state.adapter._replace(weights={"base": in_types_of(self.base, own)})

    def pack_version(self, version: Adapter, lora_config: LoraConfig) -> dict[str, Content]:
        if version.own_base is not None:
            return self._model_files(version)
        tensors, config = adapter_to_peft(version, lora_config, self.model.config)
        return {PEFT_TENSORS: save(tensors), PEFT_CONFIG: json.dumps(config, indent=1).encode()}

    def pack_model(self, state: ModelState) -> dict[str, Content]:
        return self._model_files(state.adapter)

    def load_version(self, path: str) -> Adapter:
        """Weights of a sampler checkpoint, or those of a training checkpoint, to sample from.

        Raises:
            StorageError: Missing or damaged files.
            RequestError: The adapter does not fit the served base model or `max_lora_rank`.
        """
        files = read_folder(path)
        if PEFT_CONFIG in files:
            config = json.loads(files[PEFT_CONFIG])
            rank = rank_of(config)
            check_served_rank(rank, self.max_lora_rank, path)
            return adapter_from_peft(read_tensors(files[PEFT_TENSORS]), config, self.model.config, padded_rank(rank))[0]
        if WEIGHTS in files:
            return Adapter({"base": self._whole_model(files)}, jnp.float32(1))
        kind = kind_of(header_of(files, path))
        check_served_rank(kind.lora_config.rank, self.max_lora_rank, path)
        weights = _on_device(_unflatten(load(files[TRAINING_TENSORS]))["weights"], {"base": self.base})
        weights.pop("value_head", None)
        if "base" in weights:
            weights["base"] = in_types_of(self.base, weights["base"])
        return Adapter(weights, jnp.asarray(kind.lora_config.scaling, jnp.float32))

    def _whole_model(self, files: dict[str, bytes]) -> Any:
        """Parameters of a model in Hugging Face format, in the structure and the types of the base model's."""
        with TemporaryDirectory() as folder:
            Path(folder, WEIGHTS).write_bytes(files[WEIGHTS])
            return nnx.split(with_weights(self.model, folder))[1]

    def _model_files(self, adapter: Adapter) -> dict[str, Content]:
        return model_files(self.folder, self.model.config, self.base, adapter, self.value_head)


def pack_training(state: ModelState, base_model: str) -> dict[str, Content]:
    """Files of a training checkpoint or snapshot: weights, moments, step, LoRA configuration, gradient sums if any.

    Tensors are copied one by one, as they are written.
    """
    parts = {"weights": state.adapter.weights, "first_moment": state.first_moment, "second_moment": state.second_moment}
    if state.gradient_sums is not None:
        parts["gradient_sums"] = state.gradient_sums
    tensors = {name: tensor_of(array) for name, array in _flatten(parts).items()}
    header = pack_header(Kind(state.lora_config, state.value_head), base_model, state.step, state.sequences)
    return {TRAINING_TENSORS: tensor_file(tensors), TRAINING_STATE: header}


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
