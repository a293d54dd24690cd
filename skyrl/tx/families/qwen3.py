"""Qwen3, dense (https://arxiv.org/abs/2505.09388): grouped-query attention with QK norms per head."""

from typing import Any

from skyrl.tx.design.dense import attention_of, dense_design
from skyrl.tx.design.design import Design
from skyrl.tx.design.family import FAMILIES, Family, Size


def design(config: Any) -> Design:
    """Return the design of a configuration."""
    bias = config.attention_bias
    return dense_design(config, attention_of(config, bias=bias, output_bias=bias, head_norms=True))


def config(size: Size) -> dict[str, Any]:
    """Return config.json members: no biases and no windows, as in the published models."""
    return {
        "attention_bias": False,
        "max_window_layers": size.layers,
        "sliding_window": None,
        "use_sliding_window": False,
    }


FAMILIES.register("Qwen3ForCausalLM")(Family("qwen3", "Qwen3, dense", design, config))
