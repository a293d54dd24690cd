"""Parameters that a token passes through, against the gradients of one token in transformers."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from skyrl.backends.active_parameters import active_parameters

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "intermediate_size": 24,
}
CONFIGS = {
    "dense": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=12, num_experts=7, num_experts_per_tok=3),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=6, num_experts_per_tok=2, layer_types=["full_attention"] * 3),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 2, "head_dim": 4},
        first_k_dense_replace=1,
        moe_intermediate_size=12,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
}


def passed_through(model: torch.nn.Module) -> int:
    """Count of elements of what has a gradient after one token: all but embeddings that are looked up, and but experts
    that it was not sent to; and of the biases that balance experts, which have none."""
    model(input_ids=torch.tensor([[5]])).logits.sum().backward()
    count = sum(model.state_dict()[name].numel() for name, _ in model.named_buffers() if name in model.state_dict())
    for name, parameter in model.named_parameters():
        if ".experts." in name:  # one matrix for each, along the first axis
            for expert, gradient in zip(parameter, parameter.grad, strict=True):
                count += expert.numel() * bool(gradient.any())
        elif "embed_tokens" not in name or model.config.tie_word_embeddings:
            count += parameter.numel()
    return count


@pytest.mark.parametrize("name", CONFIGS)
def test_active_parameters_are_those_that_a_token_passes_through(name: str, tmp_path: Path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():  # what begins as zeros or ones would hide where gradients go
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    assert active_parameters(tmp_path) == passed_through(model)
