"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2412.15115): grouped-query attention with biases on query, key and value."""

from typing import Any

from skyrl.tx.design.dense import attention_of, dense_design
from skyrl.tx.design.design import Design
from skyrl.tx.design.family import FAMILIES, Family, Size


def design(config: Any) -> Design:
    """Return the design of a configuration.

    With `use_sliding_window`, layers from `max_window_layers` on have a window.
    """
    return dense_design(config, attention_of(config, bias=True))


def config(size: Size) -> dict[str, Any]:
    """Return config.json members: no windows, as in most of the published models."""
    return {"max_window_layers": size.layers, "sliding_window": None, "use_sliding_window": False}


FAMILIES.register("Qwen2ForCausalLM")(Family("qwen2", "Qwen2, Qwen2.5", design, config))
