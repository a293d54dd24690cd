"""Llama 3 (https://arxiv.org/abs/2407.21783), and other models with its architecture."""

from typing import Any

from skyrl.tx.design.dense import attention_of, dense_design
from skyrl.tx.design.design import Design, LayerKind
from skyrl.tx.design.family import FAMILIES, Family, Size

SCALING = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
"""RoPE scaling of Llama 3.2."""


def design(config: Any) -> Design:
    """Return the design of a configuration."""
    bias = getattr(config, "attention_bias", False)
    return dense_design(
        config,
        attention_of(config, bias=bias, output_bias=bias),
        kinds=[LayerKind()] * config.num_hidden_layers,
        mlp_bias=getattr(config, "mlp_bias", False),
    )


def config(size: Size) -> dict[str, Any]:
    """Return config.json members: the context was extended by a factor of sixteen."""
    scaling = SCALING | {"original_max_position_embeddings": max(1, size.max_position // 16)}
    return {"attention_bias": False, "mlp_bias": False, "rope_scaling": scaling, "rope_theta": 500_000.0}


FAMILIES.register("LlamaForCausalLM")(Family("llama", "Llama 2, 3, 3.1, 3.2, 3.3", design, config))
