"""Facts about a base model that workers report to the driver."""

from typing import NamedTuple

import torch

from skyrl.backends.torch.base_model.experts import names_in_files
from skyrl.backends.torch.base_model.lora import Target
from skyrl.backends.torch.base_model.memory import WorkerMemory
from skyrl.backends.torch.base_model.model import LoadedModel


class ModelFacts(NamedTuple):
    """Facts about the base model, as the driver needs them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    longest: int | None
    """Longest sequence in tokens that the model supports; None: no limit."""
    targets: tuple[Target, ...]
    parameters: dict[str, tuple[int, ...]]
    """Shapes of the base model's parameters, by Hugging Face's names."""
    buffers: dict[str, tuple[tuple[int, ...], str]]
    """Shapes and dtypes of the base model's buffers that are in its files."""
    embedding: str
    """Name of the embedding's weights in `parameters`."""
    dtype: str
    device: str
    packs: bool
    is_sharded: bool
    """True if ranks share the base weights, so that all take part in each pass."""
    shards: int
    """Number of ranks that share one copy of the base weights."""
    tile_ranks: int
    """Number of consecutive ranks that compute each micro-batch together."""
    trains_whole: bool
    """True if models can be fully trained."""
    nested_names: bool
    """True if adapter files use the module names of a multimodal model."""
    expert_names: dict[str, str]
    """`names_in_files` of a model whose experts can have adapters; empty for other models."""
    cache_shapes: tuple[tuple[int, int, int], ...]
    """(key heads, key width, value width) of each layer; empty if the model cannot be sampled."""
    decided: WorkerMemory
    """Memory plan of a rank, and decisions that were left to it."""

    @classmethod
    def of(cls, model: LoadedModel, device: torch.device, decided: WorkerMemory) -> "ModelFacts":
        """Facts about a model on a rank's device."""
        config = model.config
        return cls(
            architecture=(config.architectures or [type(model.hf).__name__])[0],
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            longest=getattr(config, "max_position_embeddings", None),
            targets=tuple(model.targets),
            parameters=model.base.shapes,
            buffers=model.buffers,
            embedding=model.embedding,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(device),
            packs=model.packs,
            is_sharded=model.base.is_sharded,
            shards=model.base.shards,
            tile_ranks=model.tile_ranks,
            trains_whole=model.tensor_ranks.size == 1,
            nested_names=model.nested_names,
            expert_names=names_in_files(model.hf) if any(target.experts for target in model.targets) else {},
            cache_shapes=model.cache_shapes,
            decided=decided,
        )
