"""Defects of model families: what their designs say and layers leave out."""

from defects import Defect, Edit

FAMILIES = "tests/backends/test_families.py::"
LOGITS = FAMILIES + "test_logits_equal_those_of_transformers"

FAMILY_DEFECTS = [
    Defect(
        "C1.6",
        "the rows of a bank use the expert matrices of its first adapter",
        [Edit("skyrl/tx/models/experts.py", "chosen * slots + jnp.clip(of_row, 0, slots - 1)", "chosen * slots")],
        [FAMILIES + "test_the_sampler_generates_what_transformers_does_with_shared_prefixes[Qwen3MoeForCausalLM]"],
    ),
    Defect(
        "C1.11",
        "frequencies of Llama 3.1 are not scaled",
        [Edit("skyrl/tx/design/rotations.py", '    "llama3": _llama3,\n', '    "llama3": _default,\n')],
        [LOGITS + "[LlamaForCausalLM-20000-False]"],
    ),
    Defect(
        "loaded twice",
        "a parameter of all layers is in memory twice while it is loaded",
        [Edit("skyrl/tx/io/weights.py", "tensors.take, place=jax.device_put)", "tensors.take)")],
        ["tests/tx/test_loading_memory.py::test_the_peak_is_the_model_and_its_largest_tensor[qwen3-float32]"],
    ),
    Defect(
        "mscale",
        "scores of a DeepSeek-V3 whose context was extended are not sharpened",
        [Edit("skyrl/tx/families/deepseek_v3.py", " * score_factor(config)", "")],
        [LOGITS + "[DeepseekV3ForCausalLM-0-False]"],
    ),
    Defect(
        "correction",
        "what balances experts changes their weights, not only which are chosen",
        [Edit("skyrl/tx/models/experts.py", "if ranked is not scores:", "if ranked is None:")],
        [LOGITS + "[DeepseekV3ForCausalLM-0-False]"],
    ),
    Defect(
        "absorbed",
        "in decoding with latents, the rows of a bank use the matrices of its first adapter",
        [Edit("skyrl/tx/layers/lora.py", "b[slots] * scaling", "b[0 * slots] * scaling")],
        [FAMILIES + "test_the_sampler_generates_what_transformers_does_with_shared_prefixes[DeepseekV3ForCausalLM]"],
    ),
    Defect(
        "beside experts",
        "adapters on shared experts and dense layers are not named, so PEFT leaves them out",
        [Edit("skyrl/tx/io/peft.py", "lora_config, modules, parameters)", "lora_config, modules)")],
        [FAMILIES + "test_our_adapter_in_peft_gives_the_same_logits[DeepseekV3ForCausalLM]"],
    ),
    Defect(
        "window",
        "a token sees one token more than its window has",
        [
            Edit(
                "skyrl/tx/layers/packed_attention.py",
                "jnp.arange(keys)[None, None, :] < window",
                "jnp.arange(keys)[None, None, :] <= window",
            )
        ],
        [LOGITS + "[MistralForCausalLM-0-False]", LOGITS + "[Gemma3ForCausalLM-0-False]"],
    ),
    Defect(
        "router",
        "scores of experts are rounded to bfloat16 where the model is",
        [
            Edit(
                "skyrl/tx/models/experts.py",
                'jnp.matmul(x.astype(jnp.float32), self.kernel[...].astype(jnp.float32), precision="highest")',
                "jnp.matmul(x, self.kernel[...]).astype(jnp.float32)",
            )
        ],
        [
            "tests/tx/models/test_experts.py::test_scores_that_bfloat16_cannot_tell_apart_are_told_apart",
            "tests/tx/models/test_experts.py::test_tokens_have_the_experts_of_their_float64_scores_unless_those_are_"
            "nearly_equal[probabilities-bfloat16]",
        ],
    ),
]
