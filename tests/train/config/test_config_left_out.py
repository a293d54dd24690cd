"""Fields that are left out of a configuration follow from those that are set: a minimal one needs no second setting."""

import sys

import pytest

from skyrl.train.config import ConfigError, ModelConfig, SFTConfig, SkyRLTrainConfig

ROWS = "data.train_data=rows.jsonl"


def resolved(*overrides: str) -> SkyRLTrainConfig:
    return SkyRLTrainConfig.from_cli_overrides(overrides).resolve()


def test_training_data_alone_are_evaluated_on_nothing():
    config = resolved(ROWS)
    assert (config.data.val_data, config.trainer.eval_interval, config.trainer.eval_before_train) == ([], 0, False)


def test_validation_data_alone_switch_evaluation_on():
    config = resolved(ROWS, "data.val_data=held.jsonl")
    assert config.data.val_data == ["held.jsonl"]
    assert (config.trainer.eval_interval, config.trainer.eval_before_train) == (5, True)


def test_validation_data_of_the_default_are_kept_where_they_are(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    (tmp_path / "data" / "gsm8k" / "validation.parquet").touch()
    config = resolved(ROWS)
    assert config.data.val_data == [f"{tmp_path}/data/gsm8k/validation.parquet"]
    assert config.trainer.eval_interval == 5


def test_defaults_of_the_table_stay_where_no_data_are_given():
    assert resolved().data == SkyRLTrainConfig().data
    assert resolved().trainer.eval_interval == 5


def test_an_evaluation_that_was_asked_for_without_data_is_refused():
    with pytest.raises(ConfigError, match="there is nothing to evaluate on"):
        resolved(ROWS, "trainer.eval_interval=2")


def test_a_model_by_default_counts_as_left_out():
    assert not SkyRLTrainConfig().trainer.policy.model.is_given("path")
    assert not SFTConfig().model.is_given("path")
    assert not SFTConfig.from_cli_overrides(["model.lora.rank=4"]).model.is_given("path")


def test_a_model_that_is_named_counts_as_given_though_it_is_the_default():
    path = SFTConfig().model.path
    assert SFTConfig.from_cli_overrides([f"model.path={path}"]).model.is_given("path")
    assert SFTConfig(model=ModelConfig(path=path)).model.is_given("path")


def test_the_tracker_that_is_left_out_is_one_that_can_be_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert resolved().trainer.logger == "console"
    assert resolved("trainer.logger=wandb").trainer.logger == "wandb", "which is warned of"
