"""Defects of model families: what their designs say and layers leave out."""

from defects import Defect, Edit

FAMILIES = "tests/backends/test_families.py::"
FUSED = "tests/backends/test_fused_experts.py::"
SAMPLING = (
    "tests/backends/test_family_sampling.py::"
    "test_forks_of_a_prompt_and_its_return_after_eviction_have_the_log_probabilities_of_training"
)
PAGE = "tests/tx/test_families_page.py::"
CONNECTOR = "tests/tx/layers/test_connector.py::"
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
        [LOGITS + "[20000-False-LlamaForCausalLM]"],
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
        [LOGITS + "[20000-False-DeepseekV3ForCausalLM]"],
    ),
    Defect(
        "correction",
        "what balances experts changes their weights, not only which are chosen",
        [Edit("skyrl/tx/models/experts.py", "if ranked is not scores:", "if ranked is None:")],
        [LOGITS + "[20000-False-DeepseekV3ForCausalLM]"],
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
        [LOGITS + "[20000-False-MistralForCausalLM]", LOGITS + "[20000-False-Gemma3ForCausalLM]"],
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
    Defect(
        "fused B",
        "in lora_B of fused experts, experts are the outer of the columns",
        [Edit("skyrl/utils/adapters/experts.py", "for pair in pairs], axis=-1)", "for pair in pairs], axis=1)")],
        [
            FUSED + "test_peft_computes_our_logits_with_fused_experts[Qwen3MoeForCausalLM]",
            FUSED + "test_fused_experts_are_cut_apart_into_the_same_matrices",
        ],
    ),
    Defect(
        "fused order",
        "experts are fused in the order of their names, in which 10 comes before 2",
        [
            Edit(
                "skyrl/utils/adapters/experts.py",
                "[own[number] for number in sorted(own)]",
                "[own[number] for number in own]",
            )
        ],
        [FUSED + "test_fused_experts_are_cut_apart_into_the_same_matrices"],
    ),
    Defect(
        "torch loads",
        "the torch backend is recommended for models that it does not load",
        [Edit("skyrl/tx/families/known.py", "if _torch_loads(config) else", "if config else")],
        [
            PAGE
            + "test_the_torch_backend_is_recommended_where_transformers_makes_that_model[t5-T5ForConditionalGeneration]"
        ],
    ),
    Defect(
        "mesh of projection",
        "lora_A of the vocabulary projection is cut as its output",
        [Edit("skyrl/tx/design/sharding.py", "matrix if param.transposed else matrix[::-1]", "matrix")],
        [
            "tests/tx/test_sharding.py::test_an_adapter_has_the_input_axis_in_a_and_the_output_axis_in_b[LlamaForCausalLM]"
        ],
    ),
    Defect(
        "whole norms",
        "queries of OLMo 2 are not normalised",
        [
            Edit(
                "skyrl/tx/models/layer.py",
                "if norm is not None and design.whole",
                'if norm == "k_norm" and design.whole',
            )
        ],
        [LOGITS + "[20000-False-Olmo2ForCausalLM]"],
    ),
    Defect(
        "fused rank",
        "the rank of fused experts that a pattern names is that of the whole adapter",
        [
            Edit(
                "skyrl/utils/adapters/experts.py",
                'int(ranks.of(f"{experts}.{parameter}", config["r"]))',
                'int(config["r"])',
            )
        ],
        [FAMILIES + "test_pefts_adapter_here_gives_the_same_logits[Qwen3MoeForCausalLM]"],
    ),
    Defect(
        "fork",
        "a sample begins with an empty page where its prompt ends within one",
        [
            Edit(
                "skyrl/backends/common/sampling/sampler.py",
                "self._runner.copy_pages(copies)",
                "self._runner.copy_pages([])",
            )
        ],
        [SAMPLING + "[LlamaForCausalLM]"],
    ),
    Defect(
        "sinkhorn",
        "what streams keep and give is made doubly stochastic by one round only",
        [Edit("skyrl/tx/layers/connector.py", "ROUNDS = 20", "ROUNDS = 1")],
        [CONNECTOR + "test_streams_after_a_block_are_those_of_the_formulas[(0.7, -1.3, 1.6)]"],
    ),
    Defect(
        "b_post",
        "streams of a new adapter get more than what a block adds",
        [Edit("skyrl/tx/layers/connector.py", "np.linspace(-SPREAD, SPREAD, n)", "np.linspace(0, SPREAD, n)")],
        [CONNECTOR + "test_at_the_start_the_mean_of_the_streams_is_the_plain_residual_stream[4]"],
    ),
    Defect(
        "slot 0's connectors",
        "all rows of a bank have the connectors of its first adapter",
        [Edit("skyrl/tx/layers/connector.py", "own = lora.slots[:, None] ==", "own = 0 * lora.slots[:, None] ==")],
        [CONNECTOR + "test_rows_of_a_bank_have_the_connectors_of_their_slots_and_those_without_one_none"],
    ),
    Defect(
        "frozen connectors",
        "a connector that an adapter does not have is trained",
        [Edit("skyrl/tx/layers/connector.py", "jnp.where(scale == 0, 0.0, bias)", "bias")],
        [CONNECTOR + "test_a_part_whose_alpha_is_zero_has_no_gradient"],
    ),
    Defect(
        "connectors left out",
        "snapshots and checkpoints hold no connectors",
        [
            Edit(
                "skyrl/backends/jax/models/tensor_names.py",
                "    for target in connector_targets(model_config):",
                "    for target in connector_targets(model_config)[:0]:",
            )
        ],
        ["tests/backends/test_connectors.py::test_a_snapshot_goes_on_to_the_bit"],
    ),
]
