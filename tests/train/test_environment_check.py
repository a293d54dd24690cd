"""Rows that an environment refuses, found before a model is loaded."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from skyrl.envs.env import Env, NoSettings, StepResult
from skyrl.errors import ConfigError
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.data.prompt_dataset import PromptDataset, PromptReader
from skyrl.train.rl.environment_check import check_rows

GIVEN = {"prompt": [{"role": "user", "content": "3 + 4"}], "reward_spec": {"ground_truth": "7"}}


class Reading(Env[NoSettings]):
    """Reads a column as a dict is read."""

    made: ClassVar[int] = 0
    closed: ClassVar[int] = 0

    def __init__(self, config: NoSettings, extras: Mapping[str, Any]):
        super().__init__(config, extras)
        Reading.made += 1
        self.answer = extras["answer"]
        if self.answer == "down":
            raise OSError("no server")
        if self.answer == "package":
            raise ModuleNotFoundError("No module named 'there'")
        if self.answer == "defect":
            self.answer = self.answr

    async def step(self, action: str) -> StepResult:
        return StepResult([], 1.0, done=True)

    async def close(self) -> None:
        Reading.closed += 1


def level(response: str, level: str) -> float:
    return float(response == level)


def check(folder: Path, rows: list[dict[str, Any]], env_class: str) -> None:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = PromptDataset([str(path)], PromptReader(env_class, lambda prompt: 1), max_prompt_length=1)
    config = SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=jax"]).resolve()
    asyncio.run(check_rows(config, prompts))


@pytest.mark.parametrize("lacking", [{}, {"reward_spec": {}}, {"reward_spec": {"ground_truth": None}}])
def test_a_row_in_the_middle_that_lacks_a_column_is_named(tmp_path, lacking):
    rows = [GIVEN, GIVEN, {"prompt": GIVEN["prompt"], **lacking}, GIVEN]
    with pytest.raises(ConfigError, match=r"rows\.jsonl, row 2: environment 'gsm8k': the row has no reward_spec"):
        check(tmp_path, rows, "gsm8k")


def test_the_columns_of_the_row_are_told_without_those_that_rollouts_add(tmp_path):
    with pytest.raises(ConfigError, match=r"\(it has no columns besides the prompt\); add the column"):
        check(tmp_path, [{"prompt": GIVEN["prompt"]}], "gsm8k")


def test_a_row_without_a_parameter_of_a_reward_function_is_named(tmp_path):
    rows = [{**GIVEN, "level": "a"}, GIVEN]
    with pytest.raises(ConfigError, match=r"rows\.jsonl, row 1: environment '.*:level': the function takes level"):
        check(tmp_path, rows, f"{__name__}:level")


def test_a_column_that_an_environment_reads_from_a_dict_is_named(tmp_path):
    said = r"rows\.jsonl, row 1: environment '.*:Reading' raised KeyError: 'answer' when .* columns reward_spec;"
    with pytest.raises(ConfigError, match=said):
        check(tmp_path, [{**GIVEN, "answer": "7"}, GIVEN], f"{__name__}:Reading")


def test_one_environment_is_made_and_closed_for_rows_of_a_kind(tmp_path):
    Reading.made = Reading.closed = 0
    check(tmp_path, [{**GIVEN, "answer": str(number)} for number in range(9)], f"{__name__}:Reading")
    assert (Reading.made, Reading.closed) == (1, 1)


def test_an_environment_that_cannot_be_made_now_is_left_to_rollouts(tmp_path, caplog):
    check(tmp_path, [{**GIVEN, "answer": "down"}], f"{__name__}:Reading")
    assert "row 0: environment" in caplog.text and "OSError: no server" in caplog.text


def test_a_defect_of_an_environment_is_named_with_its_line(tmp_path):
    said = r"rows\.jsonl, row 0: environment '.*:Reading' .*test_environment_check\.py, line \d+: AttributeError"
    with pytest.raises(ConfigError, match=said):
        check(tmp_path, [{**GIVEN, "answer": "defect"}], f"{__name__}:Reading")


def test_a_package_that_is_missing_is_named_with_the_row(tmp_path):
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl, row 0: environment .*ModuleNotFoundError: No module named 'there'"
    ):
        check(tmp_path, [{**GIVEN, "answer": "package"}], f"{__name__}:Reading")


class OfAnotherClass(Reading):
    class Config:  # pyright: ignore[reportIncompatibleVariableOverride]
        answer: str = "7"


def test_settings_of_another_class_are_refused_with_the_right_one(tmp_path):
    with pytest.raises(ConfigError, match=r"is no settings class; make it .* base class .*\.BaseConfig"):
        check(tmp_path, [{**GIVEN, "answer": "7"}], f"{__name__}:OfAnotherClass")


def test_every_row_of_an_environment_of_its_own_is_checked(tmp_path):
    rows = [{**GIVEN, "env_class": "arithmetic"}, {"prompt": GIVEN["prompt"], "env_class": "gsm8k"}]
    with pytest.raises(ConfigError, match=r"rows\.jsonl, row 1: environment 'gsm8k'"):
        check(tmp_path, rows, "arithmetic")
