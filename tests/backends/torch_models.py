"""Small random models of several architectures, written by transformers."""

from pathlib import Path

import torch
import transformers

from skyrl.tx.synthetic.make_tokenizer import END, PAD, make_tokenizer

VOCAB = 512
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
UNROTATED = {"vocab_size": VOCAB, "initializer_range": 0.2}
GROUPED = {**SIZES, "num_key_value_heads": 2}
STATES = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}

CONFIGS = {
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES),
    "phi": lambda: transformers.PhiConfig(**GROUPED),
    "olmo2": lambda: transformers.Olmo2Config(**GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, head_dim=8, sliding_window=6),
    "granite": lambda: transformers.GraniteConfig(**GROUPED, logits_scaling=3.0),
    "llama": lambda: transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=6),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=6),
}
"""By model type: fused qkv, partial rotation and biases, norms after, windows and soft caps, scaled logits, tied,
biases of qkv, rotations and windows by layer."""
UNSAMPLED = {
    "bloom": lambda: transformers.BloomConfig(**UNROTATED, hidden_size=32, n_layer=2, n_head=4),
    "falcon_h1": lambda: transformers.FalconH1Config(**GROUPED, **STATES, head_dim=8),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **GROUPED, head_dim=8, sliding_window=6, num_local_experts=2, num_experts_per_tok=1
    ),
    "mamba": lambda: transformers.MambaConfig(**UNROTATED, hidden_size=32, num_hidden_layers=2),
}
"""By model type: attention of its own, with biases for distances; a state beside attention; sinks; no attention."""
UNPACKED = {
    "lfm2": lambda: transformers.Lfm2Config(**GROUPED, full_attn_idxs=[1]),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **GROUPED,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        layer_types=["linear_attention", "full_attention"],
        mlp_only_layers=[0, 1],
    ),
}
"""By model type: convolutions, and states, in place of attention in some layers."""
EXPERTS = {
    "phimoe": lambda: transformers.PhimoeConfig(**GROUPED, num_local_experts=4),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **GROUPED, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **GROUPED, head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "mixtral": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES,
        **{"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
        **{"kv_lora_rank": 16, "q_lora_rank": 16, "first_k_dense_replace": 1, "moe_intermediate_size": 24},
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    ),
    "jetmoe": lambda: transformers.JetMoeConfig(
        **UNROTATED, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8, num_local_experts=4
    ),
}
"""By model type: routers of several kinds."""
NOISY = {"opt": lambda: transformers.OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32)}
"""By model type: layers that are dropped at random in training mode."""
REFUSED = {"gpt2": lambda: transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, bos_token_id=None)}
"""By model type: no linear maps."""


def make_model(folder: Path, kind: str, **options) -> Path:
    """A folder with a random model and the built-in tokenizer; `options` are laid over its configuration."""
    config = (CONFIGS | UNSAMPLED | UNPACKED | EXPERTS | NOISY | REFUSED)[kind]()
    return save(folder, config, **options)


def save(folder: Path, config, **options) -> Path:
    """A folder with a random model of a configuration and the built-in tokenizer."""
    tokenizer = make_tokenizer(VOCAB)
    special = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    config.update({**special, **options})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.update(**special)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return folder
