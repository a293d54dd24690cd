"""Registration of a model family: its description, and a configuration of any size to make models from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyrl.tx.design.design import Design
from skyrl.utils.registry import Registry


@dataclass(frozen=True)
class Size:
    """Dimensions of a model that is made up."""

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
    """Those that it is known for."""
    design: Callable[[Any], Design]
    """The description of a configured model. Raises ValueError for options that are not implemented."""
    config: Callable[[Size], dict[str, Any]]
    """Members of config.json that `made_config` does not give, or gives another value."""
    multimodal: tuple[str, ...] = ()
    """Architectures of models whose text part is one of the family."""


FAMILIES: Registry[Family] = Registry("model architecture")
"""By Hugging Face architecture name (`architectures` of config.json)."""


def made_config(architecture: str, size: Size) -> dict[str, Any]:
    """Members of a config.json for a model of this size, in alphabetical order."""
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
