"""Gemma 3 (https://arxiv.org/abs/2503.19786), text: a window in most layers, and norms before and after each block."""

from typing import Any

from skyrl.tx.design.config import activation_of, layer_types
from skyrl.tx.design.dense import attention_of, dense_design
from skyrl.tx.design.design import Design, Gated, LayerKind
from skyrl.tx.design.family import FAMILIES, Family, Size
from skyrl.tx.design.rotations import frequencies

KINDS = ("full_attention", "sliding_attention")


def design(config: Any) -> Design:
    """Return the design of a configuration. Layers with a window have separate rotations.

    Scores of attention have no cap: transformers ignores `attn_logit_softcapping` in this family.

    Raises ValueError for bidirectional attention.
    """
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError(
            "use_bidirectional_attention=true: attention to later tokens is not implemented; use a model that generates"
        )
    bias, types = config.attention_bias, layer_types(config) or []
    window = {"full_attention": None, "sliding_attention": config.sliding_window}
    attention = attention_of(
        config,
        bias=bias,
        output_bias=bias,
        head_norms=True,
        scale=config.query_pre_attn_scalar**-0.5,
    )
    feed_forward = Gated(config.intermediate_size, activation_of(config, "hidden_activation"))
    return dense_design(
        config,
        attention,
        kinds=[LayerKind(window[kind], KINDS.index(kind)) for kind in types],
        feed_forwards=[feed_forward] * len(types),
        output_norms=True,
        rotations=tuple(frequencies(config, kind) for kind in KINDS),
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
    )


def config(size: Size) -> dict[str, Any]:
    """Return config.json members: a window of an eighth of the context in five of six layers."""
    types = ["sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(size.layers)]
    plain = {"rope_type": "default"}
    return {
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types,
        "query_pre_attn_scalar": size.head_dim,
        "rope_parameters": {
            "full_attention": plain | {"rope_theta": 1_000_000.0},
            "sliding_attention": plain | {"rope_theta": 10_000.0},
        },
        "sliding_window": max(1, size.max_position // 8),
    }


FAMILIES.register("Gemma3ForCausalLM")(
    Family("gemma3_text", "Gemma 3", design, config, multimodal=("Gemma3ForConditionalGeneration",), loads_whole=True)
)
