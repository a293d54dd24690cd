"""Values that follow from others: filled in by `resolve`, which changes nothing, and nothing after it."""

import os
from dataclasses import asdict

import pytest

from skyrl.train.config import ConfigError, SamplingParams, SkyRLTrainConfig


def resolved(*overrides: str) -> SkyRLTrainConfig:
    return SkyRLTrainConfig.from_cli_overrides(overrides).resolve()


def test_the_defaults_resolve_without_a_warning():
    assert isinstance(resolved(), SkyRLTrainConfig)


def test_the_input_is_as_long_as_the_prompt_in_one_turn():
    assert resolved("trainer.max_prompt_length=77").generator.max_input_length == 77


def test_engines_get_the_trainers_rotary_embeddings():
    config = resolved("trainer.rope_theta=5e5", "trainer.rope_scaling={rope_type: yarn, factor: 4}")
    assert config.generator.rope_theta == 5e5
    assert config.generator.rope_scaling == {"rope_type": "yarn", "factor": 4}


def test_engines_keep_rotary_embeddings_of_their_own():
    assert resolved("trainer.rope_theta=5e5", "generator.rope_theta=1e4").generator.rope_theta == 1e4


def test_the_policy_is_trained_at_the_temperature_that_samples():
    assert resolved("generator.sampling_params.temperature=0.7").trainer.algorithm.temperature == 0.7


def test_the_longest_sequence_of_one_turn_is_prompt_and_response():
    config = resolved("trainer.max_prompt_length=100", "generator.sampling_params.max_generate_length=30")
    assert config.trainer.algorithm.max_seq_len == 130


def test_the_longest_sequence_of_several_turns_is_not_guessed():
    assert resolved("generator.max_turns=2").trainer.algorithm.max_seq_len is None


def test_the_reference_is_the_policy_before_training():
    assert resolved("trainer.policy.model.path=mine").trainer.ref.model.path == "mine"
    assert resolved("trainer.ref.model.path=other").trainer.ref.model.path == "other"


def test_a_run_has_a_folder_of_its_own_for_checkpoints_by_default():
    names = ["trainer.project_name=maths", "trainer.run_name=first"]
    assert resolved(*names).trainer.ckpt_path == os.path.expanduser("~/ckpts/maths/first")


def test_a_folder_for_checkpoints_that_is_given_is_used_as_it_is():
    assert resolved("trainer.ckpt_path=/mine", "trainer.run_name=first").trainer.ckpt_path == "/mine"


@pytest.mark.parametrize("name", ["ckpt_path", "export_path"])
def test_folders_may_begin_with_a_tilde(name, monkeypatch):
    monkeypatch.setenv("HOME", "/home/mine")
    assert getattr(resolved(f"trainer.{name}=~/runs").trainer, name) == "/home/mine/runs"


def test_fully_asynchronous_defaults_keep_their_own_rule():
    given = ["trainer.fully_async.enabled=true", "trainer.algorithm.off_policy_correction.tis_ratio_type=token"]
    trainer = resolved(*given, "trainer.placement.colocate_all=false").trainer
    assert trainer.train_batch_size == trainer.policy_mini_batch_size == 256
    with pytest.raises(ConfigError, match="train_batch_size=1024 and policy_mini_batch_size=256 differ"):
        resolved(*given, "trainer.train_batch_size=1024")


def test_evaluation_is_greedy_and_as_long_as_training():
    evaluation = resolved("generator.sampling_params.max_generate_length=30").generator.eval_sampling_params
    assert evaluation is not None
    assert (evaluation.temperature, evaluation.max_generate_length) == (0.0, 30)


def test_evaluation_takes_sampling_parameters_as_they_are():
    config = SkyRLTrainConfig()
    config.generator.eval_sampling_params = SamplingParams(temperature=0.5)
    evaluation = config.resolve().generator.eval_sampling_params
    assert evaluation == SamplingParams(temperature=0.5)


def test_resolving_leaves_the_configuration_as_it_was():
    config = SkyRLTrainConfig()
    config.resolve()
    assert config == SkyRLTrainConfig()


def test_resolving_twice_is_resolving_once():
    config = resolved("trainer.algorithm.policy_loss_type=dual_clip")
    assert config.resolve() is config


def test_a_resolved_configuration_that_was_written_resolves_to_itself():
    config = resolved("generator.sampling_params.temperature=0.7")
    assert asdict(SkyRLTrainConfig.from_dict_config(asdict(config)).resolve()) == asdict(config)


def test_a_change_after_resolving_reaches_what_follows_from_it_when_resolved_again():
    config = SkyRLTrainConfig()
    config.resolve()
    config.generator.sampling_params.temperature = 0.5
    config.trainer.policy.model.path = "other"
    again = config.resolve()
    assert (again.trainer.algorithm.temperature, again.trainer.ref.model.path) == (0.5, "other")


def test_a_resolved_configuration_cannot_be_changed():
    config = resolved()
    with pytest.raises(AttributeError, match="change the configuration it came from and resolve that again"):
        config.generator.sampling_params.temperature = 0.5
    with pytest.raises(ConfigError, match="the configuration is resolved"):
        config.with_overrides({"trainer": {"epochs": 2}})


def test_a_value_that_was_changed_in_place_is_checked():
    config = SkyRLTrainConfig()
    config.data.train_data.append(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"data\.train_data=.*: \[1\] give text"):
        config.resolve()


def test_the_old_truncated_importance_sampling_becomes_the_new_one():
    with pytest.warns(UserWarning, match="use_tis and tis_imp_ratio_cap are old names"):
        config = resolved("trainer.algorithm.use_tis=true", "trainer.algorithm.tis_imp_ratio_cap=3.0")
    correction = config.trainer.algorithm.off_policy_correction
    assert (correction.tis_ratio_type, correction.token_tis_ratio_clip_high) == ("token", 3.0)
