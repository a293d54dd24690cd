"""Mistral (https://arxiv.org/abs/2310.06825): grouped-query attention, with a window in all layers in version 0.1."""

from typing import Any

from skyrl.tx.design.config import kinds_of
from skyrl.tx.design.dense import attention_of, dense_design
from skyrl.tx.design.design import Design
from skyrl.tx.design.family import FAMILIES, Family, Size


def design(config: Any) -> Design:
    """Return the design of a configuration. The window is `sliding_window`, which is null in later versions."""
    return dense_design(config, attention_of(config), kinds=kinds_of(config, windowed=True))


def config(size: Size) -> dict[str, Any]:
    """Return config.json members: a window of an eighth of the context, as in the first version."""
    return {"rope_theta": 10_000.0, "sliding_window": max(1, size.max_position // 8)}


FAMILIES.register("MistralForCausalLM")(Family("mistral", "Mistral 7B, Mistral Nemo", design, config))
