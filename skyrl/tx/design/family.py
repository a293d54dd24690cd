"""Registration of model families: a family's design, and its configuration for random models of any size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyrl.tx.design.design import Design
from skyrl.utils.registry import Registry


@dataclass(frozen=True)
class Size:
    """Dimensions of a random model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    max_position: int


@dataclass(frozen=True)
class Family:
    """Models of one architecture."""

    model_type: str
    """`model_type` of config.json."""
    models: str
    """Names of well-known models, for the documentation."""
    design: Callable[[Any], Design]
    """Returns the design of a configuration. Raises ValueError for options that are not implemented."""
    config: Callable[[Size], dict[str, Any]]
    """Returns members of config.json that extend or override the common members in `made_config`."""
    multimodal: tuple[str, ...] = ()
    """Architectures of multimodal models that use this family as their text model."""
    loads_whole: bool = False
    """True if AutoModelForCausalLM of transformers loads these multimodal models as a whole, with the text model as
    `model.language_model`. False if it loads the text model alone."""


FAMILIES: Registry[Family] = Registry("model architecture")
"""Families by Hugging Face architecture name (`architectures` of config.json)."""


def made_config(architecture: str, size: Size) -> dict[str, Any]:
    """Return a config.json for a random model of this size, in alphabetical order."""
    family = FAMILIES[architecture]
    common = {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initializer_range": size.hidden**-0.5,
        "intermediate_size": size.intermediate,
        "max_position_embeddings": size.max_position,
        "model_type": family.model_type,
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": size.tied,
        "use_cache": True,
        "vocab_size": size.vocab,
    }
    return dict(sorted((common | family.config(size)).items()))
