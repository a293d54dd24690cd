"""A small random model of each family, as transformers writes it: deep enough to be scanned, with real rotations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from skyrl.tx.synthetic.make_tokenizer import make_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 320,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 319,
}
HEADS_OF_THEIR_OWN: dict[str, Any] = SIZES | {"num_key_value_heads": 4}
LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEEPSEEK_YARN: dict[str, Any] = {  # whose own mscale is 1, which leaves the factor of cosines at 1
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "Qwen2ForCausalLM": lambda: transformers.Qwen2Config(
        **SIZES,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=5,
        tie_word_embeddings=True,
    ),
    "Qwen3ForCausalLM": lambda: transformers.Qwen3Config(
        **SIZES, head_dim=16, max_position_embeddings=131_072, rope_parameters=dict(YARN)
    ),
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(
        **SIZES, max_position_embeddings=131_072, rope_parameters=dict(LLAMA_3_1), attention_bias=True, mlp_bias=True
    ),
    "MistralForCausalLM": lambda: transformers.MistralConfig(
        **SIZES,
        head_dim=16,
        max_position_embeddings=32_768,
        sliding_window=5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "Olmo2ForCausalLM": lambda: transformers.Olmo2Config(
        **SIZES, max_position_embeddings=65_536, rope_parameters=dict(YARN) | {"rope_theta": 500_000.0}
    ),
    "Qwen3MoeForCausalLM": lambda: transformers.Qwen3MoeConfig(
        **SIZES,
        head_dim=16,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=5,  # which this family does not have
    ),
    "Qwen3_5ForCausalLM": lambda: transformers.Qwen3_5TextConfig(
        **SIZES,
        head_dim=16,
        max_position_embeddings=262_144,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
        rms_norm_eps=1e-2,  # reads of a memory may be near 0, where a norm makes rounding large
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
    ),
    "DeepseekV3ForCausalLM": lambda: transformers.DeepseekV3Config(
        **HEADS_OF_THEIR_OWN,
        max_position_embeddings=163_840,
        rope_parameters=dict(DEEPSEEK_YARN),
        rms_norm_eps=1e-4,  # which norms of latents do not have
        q_lora_rank=20,
        kv_lora_rank=24,
        qk_nope_head_dim=10,
        qk_rope_head_dim=8,
        v_head_dim=14,
        first_k_dense_replace=2,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        moe_intermediate_size=24,
        num_mtp_layers=0,
    ),
    "Gemma3ForCausalLM": lambda: transformers.Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        max_position_embeddings=131_072,
        query_pre_attn_scalar=24,
        sliding_window=5,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}


def write_model(architecture: str, folder: Path, **changes: Any) -> Path:
    """Weights that matter everywhere: nothing is so small, or so near to 1, that leaving it out would not show."""
    torch.manual_seed(0)
    config = CONFIGS[architecture]()
    for name, value in changes.items():
        setattr(config, name, value)
    model: PreTrainedModel = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0, 0.1)
    model.save_pretrained(folder)
    make_tokenizer(SIZES["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder
