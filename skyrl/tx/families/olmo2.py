"""OLMo 2 (https://arxiv.org/abs/2501.00656): norms only after each block, and QK norms over all heads."""

from typing import Any

from skyrl.tx.design.dense import attention_of, dense_design
from skyrl.tx.design.design import Design, LayerKind
from skyrl.tx.design.family import FAMILIES, Family, Size


def design(config: Any) -> Design:
    """Return the design of a configuration."""
    bias = config.attention_bias
    return dense_design(
        config,
        attention_of(config, bias=bias, output_bias=bias, whole_norms=True),
        kinds=[LayerKind()] * config.num_hidden_layers,
        input_norms=False,
        output_norms=True,
    )


def config(size: Size) -> dict[str, Any]:
    """Return config.json members: no biases, as in the published models."""
    return {"attention_bias": False, "rope_theta": 500_000.0}


FAMILIES.register("Olmo2ForCausalLM")(Family("olmo2", "OLMo 2", design, config))
