"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2412.15115): grouped attention with biases on query, key and value."""

from typing import Any

from skyrl.tx.design.dense import attention_of, dense_design
from skyrl.tx.design.design import Design
from skyrl.tx.design.family import FAMILIES, Family, Size


def design(config: Any) -> Design:
    """A Qwen2 of the configured sizes. Layers from `max_window_layers` on have a window, if it is used."""
    return dense_design(config, attention_of(config, bias=True))


def config(size: Size) -> dict[str, Any]:
    """Without windows, as most of its models are."""
    return {"max_window_layers": size.layers, "sliding_window": None, "use_sliding_window": False}


FAMILIES.register("Qwen2ForCausalLM")(Family("qwen2", "Qwen2, Qwen2.5", design, config))
