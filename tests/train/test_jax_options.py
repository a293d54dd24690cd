"""Options that the JAX backend gets from a training configuration."""

import asyncio
import gzip
import logging
import re
from contextlib import closing
from dataclasses import dataclass

import jax
import pytest

from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.train.config import ConfigError, SFTConfig, SkyRLTrainConfig, TrainerConfig
from skyrl.train.policies.on_backend import BackendLearner
from skyrl.train.strategy.base_model import fit_context
from skyrl.train.strategy.jax_backend import JaxStrategy
from skyrl.train.strategy.strategy import create_policy, create_sft, policy_adapter

SHORT = "generator.sampling_params.max_generate_length=30"
LORA = "trainer.policy.model.lora."
ENGINE = "generator.inference_engine."
KWARGS = "model_config_kwargs.max_position_embeddings="


def resolved(*overrides: str) -> SkyRLTrainConfig:
    return SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=jax", *overrides]).resolve()


def options(*overrides: str) -> dict:
    return JaxStrategy().rl_backend_config(resolved(*overrides)).model_dump()


def test_the_base_model_is_the_policys():
    load = JaxStrategy().rl_loader(resolved("trainer.policy.model.path=/models/mine"))
    with pytest.raises(ConfigError, match="/models/mine"):
        load()


@pytest.mark.parametrize(
    ("overrides", "option", "value"),
    [
        (["trainer.bf16=true"], "dtype", "auto"),
        (["trainer.bf16=false"], "dtype", "float32"),
        (["trainer.gradient_checkpointing=true"], "gradient_checkpointing", True),
        (["trainer.gradient_checkpointing=false"], "gradient_checkpointing", False),
        (["trainer.micro_train_batch_size_per_gpu=4"], "train_micro_batch_size", 4),
        (["trainer.micro_forward_batch_size_per_gpu=3"], "forward_micro_batch_size", 3),
        ([LORA + "rank=0"], "max_lora_rank", 32),
        ([LORA + "rank=64"], "max_lora_rank", 64),
        ([LORA + "rank=8", "trainer.critic.model.lora.rank=16"], "max_lora_rank", 16),
        (["trainer.max_prompt_length=100", SHORT], "max_context_length", 130),
        (
            ["generator.max_turns=2", "generator.max_input_length=600", SHORT],
            "max_context_length",
            630,
        ),
        (["generator.max_turns=3", "trainer.max_prompt_length=100", SHORT], "max_context_length", 100 + 2 * 130 + 30),
        (["generator.eval_sampling_params.max_generate_length=2000"], "max_context_length", 2512),
        (["generator.inference_engine.max_num_seqs=7"], "sample_max_num_sequences", 7),
        (["generator.inference_engine.max_num_seqs=1024"], "sample_max_num_sequences", 1024),
        (["trainer.micro_train_batch_size_per_gpu=1"], "train_micro_batch_size", 1),
        ([], "sample_max_num_sequences", 0),
        ([], "train_micro_batch_size", 0),
        ([], "forward_micro_batch_size", 0),
        ([], "gradient_checkpointing", "auto"),
        ([ENGINE + "model_dtype=float32"], "dtype", "float32"),
        ([ENGINE + "model_dtype=bfloat16"], "dtype", "bfloat16"),
        (["trainer.bf16=false", ENGINE + "model_dtype=auto"], "dtype", "auto"),
        ([ENGINE + "enable_prefix_caching=false"], "prefix_caching", False),
        ([ENGINE + "enable_chunked_prefill=false"], "chunked_prefill", False),
        ([ENGINE + "max_num_batched_tokens=64"], "sample_max_num_batched_tokens", 64),
        ([ENGINE + "gpu_memory_utilization=0.5"], "gpu_memory_utilization", 0.5),
        ([], "gpu_memory_utilization", 0.8),
        (["trainer.use_sample_packing=false"], "train_micro_batch_size", 1),
        (["trainer.use_sample_packing=false"], "forward_micro_batch_size", 1),
        ([], "offload_after_step", True),
        (["trainer.policy.optimizer_config.offload_after_step=false"], "offload_after_step", False),
        (["trainer.critic.optimizer_config.offload_after_step=false"], "offload_after_step", False),
        (["trainer.algorithm.value_head_prefix=score"], "value_head", "score"),
        (["trainer.rope_theta=5e5", "generator.rope_theta=5e5"], "config_overrides", {"rope_theta": 5e5}),
    ],
)
def test_an_option_follows_from_other_fields(overrides, option, value):
    assert options(*overrides)[option] == value


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([ENGINE + "model_dtype=float16"], "model_dtype=float16: weights are in one of auto, float32, bfloat16"),
        ([ENGINE + "model_dtype=float32", "trainer.bf16=true"], "model_dtype=float32 and trainer.bf16=True"),
        ([ENGINE + "model_dtype=bfloat16", "trainer.bf16=false"], "model_dtype=bfloat16 and trainer.bf16=False"),
        ([ENGINE + "max_num_batched_tokens=31"], "max_num_batched_tokens=31: .* set it to 32 at least"),
        (
            [ENGINE + "max_num_batched_tokens=64", ENGINE + "max_num_seqs=65"],
            "max_num_batched_tokens=64 is below generator.inference_engine.max_num_seqs=65",
        ),
        (
            ["trainer.use_sample_packing=false", "trainer.micro_train_batch_size_per_gpu=2"],
            "use_sample_packing=False and trainer.micro_train_batch_size_per_gpu=2",
        ),
        (
            [ENGINE + "enforce_eager=false", "trainer.jax.enforce_eager=true"],
            "inference_engine.enforce_eager=False and trainer.jax.enforce_eager=True",
        ),
        (
            ["trainer.policy.use_torch_compile=true", "trainer.jax.enforce_eager=true"],
            "use_torch_compile=True and trainer.jax.enforce_eager=True",
        ),
        (["trainer.ref." + KWARGS + "64"], "trainer.ref.model_config_kwargs=.*64.* is not trainer.policy"),
        (
            ["trainer.critic." + KWARGS + "64", "trainer.policy." + KWARGS + "32"],
            "trainer.critic.model_config_kwargs=.*64.* is not trainer.policy.model_config_kwargs=.*32",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused_by_name(overrides, message):
    (problem,) = JaxStrategy().problems(resolved(*overrides))
    assert re.search(message, problem)


@pytest.mark.parametrize(
    "overrides",
    [
        [ENGINE + "enforce_eager=false"],
        ["trainer.policy.use_torch_compile=true"],
        ["trainer.placement.colocate_policy_ref=false"],
        ["trainer.policy." + KWARGS + "64", "trainer.critic." + KWARGS + "64", "trainer.ref." + KWARGS + "64"],
        ["generator.batched=true"],
    ],
)
def test_fields_that_ask_for_what_is_done_are_taken(overrides):
    config = resolved(*overrides)
    assert [*JaxStrategy().unsupported(config), *JaxStrategy().problems(config)] == []


def test_fine_tuning_keeps_models_on_the_device_too():
    config = SFTConfig.from_cli_overrides(["train_datasets=[a]", "optimizer_config.offload_after_step=false"]).resolve()
    assert JaxStrategy().sft_options(config)["offload_after_step"] is False


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], 1e-5),
        (["model.lora.rank=8"], 1e-4),
        (["optimizer_config.lr=1e-6"], 1e-6),
        (["model.lora.rank=8", "optimizer_config.lr=1e-6"], 1e-6),
    ],
)
def test_the_learning_rate_of_fine_tuning_suits_what_is_trained_unless_it_is_given(given, expected):
    config = SFTConfig.from_cli_overrides(["train_datasets=[a]", *given]).resolve()
    assert config.optimizer_config.lr == expected


def test_the_context_that_the_backend_is_given_bounds_turns_too():
    config = resolved(
        "generator.max_turns=5", "trainer.max_prompt_length=100", SHORT, "trainer.jax.max_context_length=300"
    )
    fit_context(config, 4096)
    assert config.generator.max_input_length == 300 - 30
    single = resolved("trainer.max_prompt_length=100", SHORT, "trainer.jax.max_context_length=129")
    with pytest.raises(ConfigError, match=r"trainer.max_prompt_length=100 .* trainer.jax.max_context_length allows"):
        fit_context(single, 4096)


def test_a_limit_that_is_lowered_below_the_second_turn_is_a_caution():
    config = resolved("generator.max_turns=5", "trainer.max_prompt_length=100", SHORT)
    with pytest.warns(UserWarning, match="there is no second turn"):
        fit_context(config, 150)


def test_null_leaves_a_field_out():
    config = resolved(
        "generator.max_turns=5", "trainer.max_prompt_length=100", "generator.max_input_length=null", SHORT
    )
    fit_context(config, 400)
    assert config.generator.max_input_length == 370


def test_defaults_of_a_subclass_count_as_given():
    @dataclass
    class OwnTrainer(TrainerConfig):
        micro_train_batch_size_per_gpu: int = 4
        gradient_checkpointing: bool = False
        strategy: str = "megatron"

    own = OwnTrainer()
    assert all(map(own.is_given, ("micro_train_batch_size_per_gpu", "gradient_checkpointing", "strategy")))
    assert not own.is_given("epochs") and not TrainerConfig().is_given("strategy")


def test_a_limit_of_turns_that_was_derived_is_lowered_to_the_context_and_a_given_one_is_refused():
    derived = resolved("generator.max_turns=5", "trainer.max_prompt_length=100", SHORT)
    fit_context(derived, 400)
    assert derived.generator.max_input_length == 400 - 30
    given = resolved("generator.max_turns=5", "trainer.max_prompt_length=100", "generator.max_input_length=500", SHORT)
    with pytest.raises(ConfigError, match=r"generator.max_input_length=500 and answers of 30 tokens .* than the 400"):
        fit_context(given, 400)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dtype", "bfloat16"),
        ("gradient_checkpointing", "selective"),
        ("train_micro_batch_size", 0),
        ("max_lora_rank", 128),
        ("max_context_length", 4096),
        ("sample_max_num_sequences", 3),
        ("kv_cache_gib", 0.5),
        ("deterministic", True),
    ],
)
def test_an_option_under_trainer_jax_is_laid_over_what_follows(option, value):
    overrides = [LORA + "rank=8", "generator.inference_engine.max_num_seqs=7"]
    assert options(*overrides, f"trainer.jax.{option}={str(value).lower()}")[option] == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.jax.max_lora_rnk=8", "trainer.jax.max_lora_rnk=8: there is no such option; .*mean max_lora_rank?"),
        ("trainer.jax.max_lora_rank=0", "trainer.jax.max_lora_rank=0: give 1 or more"),
        (
            "trainer.jax.gradient_reduction=mean",
            "trainer.jax.gradient_reduction=mean: trainers weight .*; leave it out",
        ),
        ("trainer.jax.num_processes=2", "trainer.jax: num_processes=2 is not served yet; leave it unset"),
    ],
)
def test_an_option_that_the_backend_does_not_take_is_refused_by_its_path(override, message):
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    with pytest.raises(ConfigError, match=f"^{pattern}"):
        options(override)


def test_the_adapter_of_the_policy_has_rank_alpha_and_seed_of_the_configuration():
    adapter = policy_adapter(resolved(LORA + "rank=16", LORA + "alpha=24", "trainer.seed=7"))
    assert (adapter.rank, adapter.alpha, adapter.seed) == (16, 24.0, 7)


def test_rank_0_trains_all_weights():
    adapter = policy_adapter(resolved(LORA + "rank=0"))
    assert (adapter.rank, adapter.train_attn, adapter.train_mlp, adapter.train_unembed) == (0, True, True, True)


def test_all_linear_layers_are_adapted_but_the_output_embedding():
    adapter = policy_adapter(resolved(LORA + "rank=16"))
    assert (adapter.train_attn, adapter.train_mlp, adapter.train_unembed) == (True, True, False)


def test_a_module_that_is_nowhere_is_refused_by_the_field_of_the_configuration(client):
    given = ["rank=4", "target_modules=[q_proj,v_prj]"]
    learner = BackendLearner(client, "refused")
    message = r"^{}\.target_modules=\[q_proj,v_prj\]: v_prj is no name .*; did you mean v_proj\?$"
    with pytest.raises(ConfigError, match=message.format(r"trainer\.policy\.model\.lora")):
        asyncio.run(create_policy(learner, resolved(*(LORA + each for each in given))))
    sft = SFTConfig.from_cli_overrides([f"model.lora.{each}" for each in given])
    with pytest.raises(ConfigError, match=message.format(r"model\.lora")):
        asyncio.run(create_sft(learner, sft))


@pytest.mark.full
@pytest.mark.parametrize("overrides", [[], [LORA + "rank=4"]])
def test_the_backend_makes_the_policy_of_a_configuration(tiny_model, overrides):
    lora_config = policy_adapter(resolved(*overrides))
    backend = JaxBackend(str(tiny_model), JaxBackendConfig(warm_up=False, compilation_cache=False))
    try:
        backend.create_model("policy", lora_config)
        assert backend.models["policy"].lora_config == lora_config
    finally:
        backend.close()


def test_what_where_available_comes_to_is_logged_in_one_line(caplog):
    with caplog.at_level(logging.INFO, logger="skyrl.train.strategy.strategy"):
        JaxStrategy().rl_loader(resolved())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "skyrl.train.strategy.strategy"]
    assert "\n" not in line
    assert all(field in line for field in ("trainer.bf16", "trainer.flash_attn", "max_num_seqs"))


def test_what_is_not_asked_for_is_not_logged(caplog):
    with caplog.at_level(logging.INFO, logger="skyrl.train.strategy.strategy"):
        JaxStrategy().rl_loader(resolved("trainer.bf16=false", "generator.inference_engine.max_num_seqs=7"))
    assert "flash_attn" in caplog.text
    assert "bf16" not in caplog.text and "max_num_seqs" not in caplog.text


@pytest.mark.full
def test_the_backend_starts_as_the_configuration_says_and_makes_the_adapter_of_the_policy(tiny_model):
    config = resolved(
        f"trainer.policy.model.path={tiny_model}",
        "trainer.max_prompt_length=40",
        SHORT,
        LORA + "rank=4",
        LORA + "alpha=6",
        "trainer.jax.warm_up=false",
        "trainer.jax.compilation_cache=false",
    )
    with closing(JaxBackend(str(tiny_model), JaxStrategy().rl_backend_config(config))) as backend:  # pyright: ignore[reportArgumentType]
        backend.create_model("policy", policy_adapter(config))
        adapter = backend.models["policy"].lora_config
        assert (adapter.rank, adapter.alpha, adapter.seed) == (4, 6.0, 42)
        assert backend.config.max_context_length == 70


def test_a_snapshot_of_memory_is_a_profile_of_what_is_on_the_device(tmp_path):
    held = jax.block_until_ready(jax.numpy.ones((1237, 1)))
    JaxStrategy().record_memory(tmp_path / "memory" / "one.prof")
    profile = gzip.decompress((tmp_path / "memory" / "one.prof").read_bytes())
    assert b"buffer" in profile and held.nbytes == 4948 and b"\xd4\x26" in profile  # 4948 as a varint
