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


@pytest.mark.parametrize(("cls", "there", "here"), NAMED)
def test_a_name_of_trl_leads_to_the_field_that_the_page_pairs_it_with(cls, there, here):
    with pytest.raises(ConfigError, match=rf"^{there}\b.*(did you mean|such as) {re.escape(here)}\b"):
        cls.from_cli_overrides([f"{there}=1"])


def test_the_page_pairs_many_names():
    assert len(NAMED) > 25


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
