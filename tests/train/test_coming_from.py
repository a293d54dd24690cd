"""Old ways to start a run do what the page says, and every name of ours in docs/coming-from.md is there."""

import importlib
import json
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from short_runs import command, metrics

from skyrl import cli
from skyrl.config.machinery.help import describe_fields
from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.train.config import DPOConfig, SFTConfig, SkyRLTrainConfig
from skyrl.train.entrypoints import main_base, main_generate
from tests.stopping import old_name, waiting

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "coming-from.md").read_text()
METRICS = (DOCS / "metrics.md").read_text()
MODULES = {
    "skyrl.train.entrypoints.main_base": SkyRLTrainConfig,
    "skyrl.train.entrypoints.main_generate": SkyRLTrainConfig,
    "skyrl.train.main_sft": SFTConfig,
}
ROOTS = ("data.", "environment.", "generator.", "trainer.")


def ours() -> list[tuple[str, str]]:
    """(head of the table's column, name between backticks) of each name in the columns of ours."""
    names, column, head = [], 0, ""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        here = [number for number, cell in enumerate(cells) if cell == "here" or cell.startswith("here,")]
        if here:
            column, head = here[0], cells[here[0]]
        elif cells and not cells[0].startswith("---"):
            names += [(head, name) for name in re.findall(r"`([^`]+)`", cells[column])]
    return names


def fields(cls: type) -> set[str]:
    """Every field of a configuration, and every section on the way to one."""
    paths = [field.path for field in describe_fields(cls())]
    return {path[:end] for path in paths for end in [*(m.start() for m in re.finditer(r"\.", path)), None]}


def is_there(head: str, name: str, rl: set[str], sft: set[str]) -> bool:
    key, equals, _ = name.partition("=")
    if name.startswith("skyrl "):
        return name.split()[1] in cli.COMMANDS
    if name.startswith("skyrl."):
        module, _, attribute = name.partition(":")
        return not attribute or hasattr(importlib.import_module(module), attribute)
    if "/" in key:
        return f"`{name}`" in METRICS
    if head.startswith("here, after"):
        return key in sft
    if key.startswith(ROOTS):
        if equals:
            SkyRLTrainConfig.from_cli_overrides([name])
        return key in rl
    return name in ("module:function", "shape_rewards", "BaseTextEnv", "skyrl_train", "data_source")


def test_every_name_of_ours_in_the_page_is_there():
    rl, sft = fields(SkyRLTrainConfig), fields(SFTConfig) | fields(DPOConfig)
    names = ours()
    assert len(names) > 90
    assert [name for head, name in names if not is_there(head, name, rl, sft)] == []


@pytest.fixture(autouse=True)
def logging_as_before(monkeypatch):
    """A command sets up logging, warnings and the path of imports of its process."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    write_rows(path, arithmetic_rows(4, seed=0, largest=9))
    return path


@pytest.mark.full
def test_the_entry_point_of_skyrl_trains(rows, tiny_model, tmp_path):
    arguments = command(rows, tiny_model, tmp_path / "run", "environment.env_class=arithmetic", "trainer.epochs=1")
    assert main_base.main(arguments) == 0
    assert [row["trainer/global_step"] for row in metrics(tmp_path / "run")] == [1]


def test_the_entry_point_of_skyrl_that_generates_evaluates_the_model_as_it_is(rows, tiny_model, tmp_path, capfd):
    arguments = command(Path("not-there"), tiny_model, tmp_path / "run", "environment.env_class=arithmetic")
    assert main_generate.main([*arguments, f"data.val_data=[{rows}]"]) == 0
    said = capfd.readouterr().out
    assert f"4 prompts evaluated with {tiny_model} as it is" in said and "eval/all/avg_score" in said
    results = tmp_path / "run-exports/dumped_evals/eval_only/aggregated_results.jsonl"
    assert "eval/all/avg_score" in json.loads(results.read_text())


@pytest.mark.parametrize(("module", "cls"), MODULES.items())
def test_a_module_of_skyrls_is_a_command_with_the_fields_of_its_configuration(module, cls):
    said = subprocess.run([sys.executable, "-m", module, "--fields"], check=True, capture_output=True, text=True).stdout
    assert all(field.path in said for field in describe_fields(cls()))


@pytest.mark.parametrize("module", MODULES)
def test_ctrl_c_during_the_imports_of_a_module_of_skyrls_is_told_in_one_line(module, tmp_path):
    with waiting(old_name(module), tmp_path) as program:
        assert program.end(signal.SIGINT)[0] == 128 + signal.SIGINT
        assert re.fullmatch("skyrl train (sft|rl): ended by SIGINT\n", program.said.read_text())


def test_a_class_of_skyrls_entry_point_is_refused_with_what_to_write():
    code = "from skyrl.train.entrypoints.main_base import BasePPOExp"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].startswith("ImportError: skyrl.train.entrypoints.main_base has no BasePPOExp")
    assert "train_rl(config)" in ended.stderr
