"""Names of other trainers, as docs/coming-from.md pairs them with ours, lead to our fields in messages."""

import re
from pathlib import Path

import pytest

from skyrl.errors import ConfigError
from skyrl.train import commands
from skyrl.train.config import SFTConfig, SkyRLTrainConfig

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()


def pairs(section: str, cls: type) -> list[tuple[type, str, str]]:
    """(class, name there, field here) of each row whose names stand one for one."""
    found = []
    for line in PAGE.split(section, 1)[1].split("\n\n")[0].splitlines()[2:]:
        there, here = ([*re.findall(r"`([^`]+)`", cell)] for cell in line.strip("|").split(" | "))
        if len(there) == len(here) and "/" not in "".join(here):  # a metric
            found += [(cls, name, field.partition("=")[0]) for name, field in zip(there, here, strict=True)]
    return [pair for pair in found if re.fullmatch(r"[a-z_]+", pair[1]) and pair[1] != pair[2].rpartition(".")[2]]


NAMED = pairs("| `GRPOTrainer`, `GRPOConfig` |", SkyRLTrainConfig) + pairs("| `SFTTrainer`, `SFTConfig` |", SFTConfig)


def pairs_of_verl() -> list[tuple[str, str]]:
    """(path there, field here) of each row about fields. Names of one section follow the first without its path."""
    found = []
    for line in PAGE.split("| verl | here |", 1)[1].split("\n\n")[0].splitlines()[2:]:
        there, here = ([*re.findall(r"`([^`]+)`", cell)] for cell in line.strip("|").split(" | "))
        section = there[0].rpartition(".")[0] if there and re.fullmatch(r"[a-z_.]+", there[0]) else ""
        if section and here[0].partition(".")[0] in ("data", "trainer", "generator", "environment"):
            paths = [name if name.startswith(section) else f"{section}.{name.lstrip('.')}" for name in there]
            here = here[: len(paths)] if len(here) >= len(paths) else here[:1] * len(paths)
            found += [(path, field.partition("=")[0]) for path, field in zip(paths, here, strict=True)]
    return [(there, here) for there, here in found if there != here]


VERL = pairs_of_verl()


@pytest.mark.parametrize(("cls", "there", "here"), NAMED)
def test_a_name_of_trl_leads_to_the_field_that_the_page_pairs_it_with(cls, there, here):
    with pytest.raises(ConfigError, match=rf"^{there}\b.*(did you mean|such as) {re.escape(here)}\b"):
        cls.from_cli_overrides([f"{there}=1"])


@pytest.mark.parametrize(("there", "here"), VERL)
def test_a_path_of_verl_leads_to_the_field_that_the_page_pairs_it_with(there, here):
    with pytest.raises(ConfigError, match=rf"^{re.escape(there)}: .*did you mean {re.escape(here)}\?$"):
        SkyRLTrainConfig.from_cli_overrides([f"{there}=1"])


def test_each_path_of_verl_in_a_file_is_told_of_and_the_rest_in_one_line():
    actor = {"optim": {"lr": 1e-6}, "ppo_epochs": 2, "grad_clip": 1.0, "fsdp_config": {"offload_policy": True}}
    with pytest.raises(ConfigError) as refused:
        SkyRLTrainConfig.from_dict_config({"actor_rollout_ref": {"actor": actor}})
    first, second, rest = str(refused.value).splitlines()
    assert first.endswith("actor.optim.lr: SkyRLTrainConfig has no field 'actor_rollout_ref'; did you mean "
                          "trainer.policy.optimizer_config.lr?")  # fmt: skip
    assert second.endswith("did you mean trainer.update_epochs_per_batch?")
    assert rest.startswith("actor_rollout_ref: SkyRLTrainConfig has no field 'actor_rollout_ref'; it has data, ")


def test_the_page_pairs_many_names():
    assert len(NAMED) > 25 and len(VERL) > 35


@pytest.mark.parametrize(
    ("kind", "option", "field"),
    [
        ("sft", "--resume", "resume_from"),
        ("sft", "--batch-size", "batch_size"),
        ("sft", "--learning_rate=1e-4", "optimizer_config.lr"),
        ("rl", "--num-train-epochs", "trainer.epochs"),
        ("rl", "--n-samples-per-prompt", "generator.n_samples_per_prompt"),
    ],
)
def test_an_option_leads_to_the_field_that_it_stands_for(kind, option, field, capsys):
    with pytest.raises(SystemExit):
        commands.COMMANDS[kind]([option, "1"])
    assert capsys.readouterr().err.endswith(f"; fields are set without dashes, as {field}=VALUE\n")
