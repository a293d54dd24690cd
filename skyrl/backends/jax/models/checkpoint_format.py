"""Checkpoint formats on JAX: training state as safetensors and JSON; sampler weights in PEFT layout, or in Hugging
Face's layout for fully trained models.

Files refer to immutable arrays, so a background thread can write them while training continues.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx
from safetensors.numpy import save

from skyrl.backends.common.models.checkpoint_folder import PEFT_CONFIG, PEFT_TENSORS, check_served_rank, peft_files
from skyrl.backends.common.models.kind import VALUE_HEAD, Kind
from skyrl.backends.common.models.store import ModelFormat, Packed
from skyrl.backends.common.models.training_files import (
    BufferName,
    TrainingFiles,
    open_training,
    pack_training,
    training_files,
)
from skyrl.backends.jax.layout import Layout
from skyrl.backends.jax.models.state import ModelState, Tree, bytes_of, in_types_of
from skyrl.backends.jax.models.tensor_names import (
    is_stacked,
    named,
    shapes,
    stacked_shapes,
    tree_of,
    tree_of_stacked,
)
from skyrl.tx.design.connectors import is_connectors
from skyrl.tx.io.export import model_files
from skyrl.tx.io.peft import adapter_from_peft, adapter_to_peft
from skyrl.tx.io.weights import with_weights
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.lora import padded_rank
from skyrl.tx.models.decoder import Decoder
from skyrl.types import LoraConfig
from skyrl.utils.adapters.plain import rank_of
from skyrl.utils.files.atomic_folders import Content, open_checked
from skyrl.utils.files.hf_files import WEIGHTS
from skyrl.utils.files.tensor_file import Tensor, read_tensors
from skyrl.utils.files.weight_files import INDEX

if TYPE_CHECKING:
    from skyrl.tx.models.configs import ModelConfig


@dataclass(frozen=True, kw_only=True)
class JaxFormat(ModelFormat[ModelState, Adapter]):
    """`ModelFormat` of pytrees of arrays."""

    base_model: str
    """Name of the base model in checkpoints."""
    folder: Path
    """Folder of the base model."""
    model: Decoder
    """The base model."""
    base: Any
    """Parameters of the split NNX model."""
    layout: Layout
    """Placement of arrays."""
    value_head: str
    """Name of the value head in exports of critics: its tensor is `<value_head>.weight`."""
    max_lora_rank: int
    """Largest rank that can be sampled."""

    def weights_bytes(self, state: ModelState) -> int:
        return bytes_of(state.adapter)

    def version_bytes(self, version: Adapter) -> int:
        return bytes_of(version)

    def pack_training(self, state: ModelState) -> Packed:
        return Packed(training_content(state, self.base_model, self.model.config))

    def load_training(
        self, path: str, check: Callable[[Kind], None], *, load_optimizer: bool = True, digest: str | None = None
    ) -> ModelState:
        with open_training(path, check, load_optimizer=load_optimizer, digest=digest) as stored:
            return self._state_of(stored)

    def _state_of(self, stored: TrainingFiles) -> ModelState:
        lora_config = stored.kind.lora_config
        if stored.is_uploaded:
            config, rank = json.loads(stored.files[PEFT_CONFIG]), padded_rank(lora_config.rank)
            adapter, _ = adapter_from_peft(read_tensors(stored.files[PEFT_TENSORS]), config, self.model.config, rank)
            return ModelState.fresh(lora_config, self.layout.place(adapter))
        scaling = jnp.asarray(lora_config.scaling, jnp.float32)
        state = ModelState.fresh(lora_config, self.layout.place(Adapter(self._tree(stored, "weights"), scaling)))
        state.step = stored.step
        if "first_moment" in stored.buffers:
            state.first_moment = self._tree(stored, "first_moment")
            state.second_moment = self._tree(stored, "second_moment")
        if "gradient_sums" in stored.buffers:
            state.gradient_sums, state.sequences = self._tree(stored, "gradient_sums"), stored.sequences
        return state

    def version_of(self, state: ModelState) -> Adapter:
        own = state.adapter.own_base
        if own is None:
            return state.adapter
        return state.adapter._replace(weights={"base": in_types_of(self.base, own)})

    def pack_version(self, version: Adapter, lora_config: LoraConfig) -> Packed:
        if version.own_base is not None:
            return self._model_files(version)
        tensors, config = adapter_to_peft(version, lora_config, self.model.config)
        on_tied = self.model.config.tie_word_embeddings and lora_config.selects("lm_head", "unembed")
        return Packed(peft_files(save(tensors), config, on_tied))

    def pack_model(self, state: ModelState) -> Packed:
        return self._model_files(state.adapter)

    def load_version(self, path: str) -> Adapter:
        """Load weights of a sampler or training checkpoint for sampling.

        Raises:
            StorageError: Missing or damaged files.
            RequestError: The adapter does not fit the served base model or `max_lora_rank`.
        """
        with open_checked(path) as files:
            if PEFT_CONFIG in files:
                config = json.loads(files[PEFT_CONFIG])
                rank = rank_of(config)
                check_served_rank(rank, self.max_lora_rank, path)
                tensors = read_tensors(files[PEFT_TENSORS])
                adapter, _ = adapter_from_peft(tensors, config, self.model.config, padded_rank(rank))
                return self.layout.place(adapter)
            if WEIGHTS in files or INDEX in files:
                whole = with_weights(self.model, path, shardings=self.layout.of_parameters(self.base))
                files.check_unmoved()
                return Adapter({"base": nnx.split(whole)[1]}, jnp.float32(1))

            def check(kind: Kind) -> None:
                check_served_rank(kind.lora_config.rank, self.max_lora_rank, path)

            stored = training_files(files, path, check, load_optimizer=False)
            weights = self._tree(stored, "weights")
            weights.pop(VALUE_HEAD, None)
            if "base" in weights:
                weights["base"] = in_types_of(self.base, weights["base"])
            return self.layout.place(Adapter(weights, jnp.asarray(stored.kind.lora_config.scaling, jnp.float32)))

    def _tree(self, stored: TrainingFiles, buffer: BufferName) -> Tree:
        """A buffer of a training checkpoint. Raises `RequestError` if it belongs to another base model.

        A checkpoint without connectors loads as a model without connectors.
        """
        config, kind, tensors = self.model.config, stored.kind, stored.arrays(buffer)
        stacked = is_stacked(tensors)
        wanted = (stacked_shapes if stacked else shapes)(config, self.base, kind)
        if not any(map(is_connectors, tensors)):
            wanted = {name: shape for name, shape in wanted.items() if not is_connectors(name)}
        stored.check_fits(stored.shapes(buffer), wanted)
        if stacked:
            return self.layout.place(tree_of_stacked(config, self.base, kind, tensors))
        return self.layout.place(tree_of(config, self.base, kind, tensors, self.layout.of_parameters(self.base)))

    def _model_files(self, adapter: Adapter) -> Packed:
        return Packed(model_files(self.folder, self.model.config, self.base, adapter, self.value_head))


def training_content(state: ModelState, base_model: str, model_config: "ModelConfig") -> dict[str, Content]:
    """Files of a training checkpoint or snapshot: weights, moments, step, LoRA configuration, and any gradient sums."""
    kind = Kind(state.lora_config, state.value_head)
    trees: dict[BufferName, Tree] = {
        "weights": state.adapter.weights,
        "first_moment": state.first_moment,
        "second_moment": state.second_moment,
    }
    if state.gradient_sums is not None:
        trees["gradient_sums"] = state.gradient_sums
    buffers: dict[BufferName, dict[str, Tensor]] = {
        buffer: named(model_config, kind, tree) for buffer, tree in trees.items()
    }
    return pack_training(kind, base_model, state.step, state.sequences, buffers)
