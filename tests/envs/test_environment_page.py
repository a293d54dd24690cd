"""The code of docs/add-an-environment.md runs as it stands and gives what it says."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl.envs import ENVS, Env, make_env

PAGE = (Path(__file__).parents[2] / "docs" / "add-an-environment.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The page's modules, by the names in their first lines."""
    folder = tmp_path_factory.mktemp("page")
    for block in BLOCKS:
        if name := re.match(r"# (\w+\.py)\n", block):
            (folder / name[1]).write_text(block)
    return folder


@pytest.fixture
def guess_env(folder, monkeypatch) -> Env:
    """An episode of the page's environment, which is registered for one test only."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(ENVS, "_objects", dict(ENVS._objects))
    return make_env("guess_env:GuessEnv", {"hint_reward": 0.1}, {"reward_spec": {"ground_truth": "5"}})


def test_the_episode_of_the_page_has_the_rewards_that_it_says(folder):
    (program,) = [block for block in BLOCKS if block.startswith("import asyncio")]
    run = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    assert f"# {run.stdout.strip()}" in program


@pytest.mark.parametrize("action", ["7\x1d", "\x1d7", "²", "٧", "", "seven", "-", "1" * 5000])
def test_the_pages_environment_survives_what_is_no_number(guess_env, action):
    step = asyncio.run(guess_env.step(action))
    assert (step.reward, step.done, step.observations[0]["content"]) == (0.0, False, "That is no number.")


@pytest.mark.parametrize("action", ["7\n", " 7", "007"])
def test_the_pages_environment_reads_numbers(guess_env, action):
    assert asyncio.run(guess_env.step(action)).observations[0]["content"] == "Lower."


def test_the_pages_synchronous_environment_runs(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    env = make_env("multiply_env:MultiplyEnv", None, {"reward_spec": {"ground_truth": "6"}})
    step = asyncio.run(env.step(" 6"))
    assert (step.reward, step.done, step.metrics) == (1.0, True, {"right": 1.0})


def test_the_page_has_every_environment():
    assert sorted(re.findall(r"^\| `(\w+)` \| \d \|", PAGE, re.MULTILINE)) == list(ENVS)


def test_the_pages_command_writes_rows(tmp_path):
    (command,) = re.findall(r"^python (-m skyrl.envs.tasks.arithmetic_data .*)$", PAGE, re.MULTILINE)
    subprocess.run([sys.executable, *command.split()], cwd=tmp_path, check=True)
    lines = (tmp_path / "data/arithmetic/validation.jsonl").read_text().splitlines()
    assert len(lines) == 256 and set(json.loads(lines[0])) == {"prompt", "env_class", "reward_spec", "extra_info"}
