"""Qwen3.5, dense: most layers are gated DeltaNets; every fourth layer has gated attention."""

from typing import Any

from skyrl.tx.design.config import activation_of, layer_types
from skyrl.tx.design.dense import attention_of, dense_design
from skyrl.tx.design.design import DeltaNet, Design, LayerKind
from skyrl.tx.design.family import FAMILIES, Family, Size
from skyrl.tx.design.rotations import frequencies


def design(config: Any) -> Design:
    """Return the design of a configuration. Multi-token prediction layers of a checkpoint are skipped.

    Rotations are computed as for text, where the three coordinates of a position are equal.
    """
    delta_net = DeltaNet(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
        activation_of(config),
    )
    bias = config.attention_bias
    attention = attention_of(config, bias=bias, output_bias=bias, head_norms=True, gated=True)
    types = layer_types(config, "full_attention", "linear_attention") or []
    return dense_design(
        config,
        [delta_net if kind == "linear_attention" else attention for kind in types],
        kinds=[LayerKind()] * len(types),
        rotations=(frequencies(config, partial=True),),
        norm_offset=1.0,
        unread=("mtp.",),
    )


def config(size: Size) -> dict[str, Any]:
    """Return config.json members: attention in every fourth layer and in the last one, and DeltaNets otherwise.

    DeltaNets have twice as many value heads as key heads.
    """
    full = {*range(3, size.layers, 4), size.layers - 1}
    types = ["full_attention" if layer in full else "linear_attention" for layer in range(size.layers)]
    rotations = {"partial_rotary_factor": 0.25 if size.head_dim % 8 == 0 else 1.0, "rope_theta": 10_000_000.0}
    return {
        "attention_bias": False,
        "layer_types": types,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": size.head_dim,
        "linear_num_key_heads": size.kv_heads,
        "linear_num_value_heads": 2 * size.kv_heads,
        "linear_value_head_dim": size.head_dim,
        "rope_parameters": rotations | {"rope_type": "default"},
    }


FAMILIES.register("Qwen3_5ForCausalLM")(
    Family("qwen3_5_text", "Qwen3.5, dense", design, config, multimodal=("Qwen3_5ForConditionalGeneration",))
)
