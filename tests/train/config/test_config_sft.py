"""The configuration of supervised fine-tuning."""

import os

import pytest

from skyrl.config.machinery.help import describe_fields, render_help
from skyrl.train.config import ConfigError, SFTConfig, get_config_as_yaml_str

DATA = ["train_datasets=[a.jsonl]"]


def resolve(*overrides: str) -> SFTConfig:
    return SFTConfig.from_cli_overrides([*DATA, *overrides]).resolve()


def test_fields_are_set_from_the_command_line():
    config = resolve("model.lora.rank=8", "optimizer_config.lr=1e-4", "train_on_what=all_assistant_messages")
    assert (config.model.lora.rank, config.optimizer_config.lr) == (8, 1e-4)
    assert config.train_on_what == "all_assistant_messages"


def test_yaml_of_a_configuration_reads_back(tmp_path):
    config = SFTConfig.from_cli_overrides([*DATA, "train_dataset_weights=[2.0]", "logger=[console, wandb]"])
    (tmp_path / "sft.yaml").write_text(get_config_as_yaml_str(config))
    assert SFTConfig.from_file(tmp_path / "sft.yaml") == config


def test_evaluation_data_sets_are_named_after_their_files():
    assert resolve("eval_datasets=[x/one.jsonl, x/two.parquet]").eval_dataset_names == ["one", "two"]


def test_folders_may_begin_with_a_tilde():
    assert resolve("ckpt_path=~/ckpts", "ckpt_interval=1").ckpt_path == os.path.expanduser("~/ckpts")


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [((), 7), (("num_epochs=3",), 21), (("num_steps=5",), 5)],
)
def test_a_run_has_as_many_steps_as_epochs_or_steps_say(overrides, steps):
    assert resolve(*overrides).steps(steps_per_epoch=7) == steps


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("train_datasets=[]",), "there is nothing to train on"),
        (("train_dataset_weights=[1.0, 2.0]",), "there are 1 train_datasets; give a weight for each"),
        (("train_dataset_weights=[0.0]",), "a number above 0"),
        (("eval_datasets=[a/x.json, b/x.json]",), r"eval_dataset_names=\['x', 'x'\]: give each of the 2"),
        (("num_epochs=1", "num_steps=1"), "num_epochs=1 and num_steps=1 both say how long"),
        (("eval_interval=5",), "eval_interval=5: there are no eval_datasets"),
        (("eval_before_train=true",), "eval_before_train=true: there are no eval_datasets"),
        (
            ("eval_datasets=[x.json]", "ckpt_path=c", "best_metric=eval/x/loss"),
            r"best_metric=eval/x/loss, ckpt_path=c, .*, eval_interval=0: there is nothing to compare",
        ),
        (("ckpt_interval=5",), "ckpt_interval=5: there is nowhere to write to; set ckpt_path"),
        (("hf_save_interval=5",), "hf_save_interval=5: there is nowhere to write to; set export_path"),
        (("resume_from=c/global_step_1",), "resume_from=c/global_step_1: there is no folder"),
        (("resume_from=latest",), "resume_from=latest: there is no folder for this run's own checkpoints"),
        (("model.path=null",), "model.path=None: there is no model"),
        (("train_on_what=last_assistant",), "did you mean last_assistant_"),
        (("logger=wandbb",), "did you mean wandb"),
        (("max_length=1",), "max_length=1: give 2 or more"),
    ],
)
def test_a_rule_that_does_not_hold_is_told(overrides, message):
    with pytest.raises(ConfigError, match=message):
        resolve(*overrides)


def test_every_field_has_a_meaning_in_the_help():
    assert [field.path for field in describe_fields(SFTConfig()) if not field.meaning] == []
    assert "train_on_what: str = last_assistant_message\n" in render_help(SFTConfig)
