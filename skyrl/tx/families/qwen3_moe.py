"""Qwen3 with experts (https://arxiv.org/abs/2505.09388): Qwen3's attention, and a mixture of experts."""

from typing import Any

from skyrl.tx.design.config import activation_of, experts_of
from skyrl.tx.design.dense import attention_of, dense_design
from skyrl.tx.design.design import Design, Experts, Gated, LayerKind
from skyrl.tx.design.family import FAMILIES, Family, Size


def design(config: Any) -> Design:
    """Return the design of a configuration.

    Every `decoder_sparse_step`-th layer has experts, unless it is in `mlp_only_layers`. All other layers are dense.
    Either all layers have a window or none has: transformers ignores `layer_types` in this family.
    """
    bias, activation, count = config.attention_bias, activation_of(config), experts_of(config) or 0
    experts = Experts(
        count, config.num_experts_per_tok, config.moe_intermediate_size, activation, normalised=config.norm_topk_prob
    )
    dense, step = getattr(config, "mlp_only_layers", None) or [], getattr(config, "decoder_sparse_step", 1)
    sparse = [count > 0 and i not in dense and (i + 1) % step == 0 for i in range(config.num_hidden_layers)]
    return dense_design(
        config,
        attention_of(config, bias=bias, output_bias=bias, head_norms=True),
        kinds=[LayerKind(config.sliding_window if config.use_sliding_window else None)] * config.num_hidden_layers,
        feed_forwards=[experts if here else Gated(config.intermediate_size, activation) for here in sparse],
    )


def config(size: Size) -> dict[str, Any]:
    """Return config.json members: sixteen experts, four per token. These four together are as wide as a dense block."""
    return {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": max(1, size.intermediate // 4),
        "norm_topk_prob": True,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "sliding_window": None,
        "use_sliding_window": False,
    }


FAMILIES.register("Qwen3MoeForCausalLM")(Family("qwen3_moe", "Qwen3 with experts (30B-A3B, 235B-A22B)", design, config))
