"""DeepSeek-V3 (https://arxiv.org/abs/2412.19437): multi-head latent attention, some dense layers, then experts."""

from typing import Any

from skyrl.tx.design.config import activation_of, experts_of
from skyrl.tx.design.dense import dense_design
from skyrl.tx.design.design import Design, Experts, Gated, LatentAttention, LayerKind
from skyrl.tx.design.family import FAMILIES, Family, Size
from skyrl.tx.design.rotations import frequencies, score_factor

ONLY = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Options that transformers ignores, with the only values that are implemented."""


def design(config: Any) -> Design:
    """Return the design of a configuration. Multi-token prediction layers are skipped.

    Raises ValueError for routing options that are not implemented.
    """
    for name, value in ONLY.items():
        if (found := getattr(config, name, value)) != value:
            raise ValueError(f"{name}={found!r} is not implemented (known: {value!r}); use another base model")
    activation, layers = activation_of(config), config.num_hidden_layers
    further = getattr(config, "num_nextn_predict_layers", None) or 0
    dense = min(config.first_k_dense_replace, layers)
    experts = Experts(
        experts_of(config) or 0,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        activation,
        normalised=config.norm_topk_prob,
        sigmoid=True,
        groups=config.n_group,
        active_groups=config.topk_group,
        factor=config.routed_scaling_factor,
        shared=config.moe_intermediate_size * (getattr(config, "n_shared_experts", None) or 0),
    )
    return dense_design(
        config,
        LatentAttention(
            config.num_attention_heads,
            config.q_lora_rank,
            config.kv_lora_rank,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
            scale=(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5 * score_factor(config),
            interleaved=getattr(config, "rope_interleave", True),
            bias=getattr(config, "attention_bias", False),
        ),
        kinds=[LayerKind()] * layers,
        feed_forwards=[Gated(config.intermediate_size, activation)] * dense + [experts] * (layers - dense),
        rotations=(frequencies(config, width=config.qk_rope_head_dim),),
        unread=tuple(f"model.layers.{layers + number}." for number in range(further)),
    )


def config(size: Size) -> dict[str, Any]:
    """Return config.json members: one dense layer, then layers with sixteen experts in four groups and a shared expert.

    Each token uses four experts of two groups.
    """
    original = max(1, size.max_position // 40)
    scaling = {"beta_fast": 32, "beta_slow": 1, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
    inner = max(1, size.intermediate // 4)
    return {
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 2 * size.head_dim,
        "moe_intermediate_size": inner,
        "n_group": 4,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "num_key_value_heads": size.heads,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": max(1, size.hidden // 2),
        "qk_nope_head_dim": size.head_dim,
        "qk_rope_head_dim": size.head_dim,
        "rope_scaling": scaling | {"original_max_position_embeddings": original},
        "rope_theta": 10_000.0,
        "routed_scaling_factor": 2.5,
        "topk_group": 2,
        "v_head_dim": size.head_dim,
    }


FAMILIES.register("DeepseekV3ForCausalLM")(Family("deepseek_v3", "DeepSeek-V3, V3.1, R1 (bfloat16)", design, config))
