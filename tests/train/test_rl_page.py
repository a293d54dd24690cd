"""docs/rl-with-my-environment.md runs as it stands and does what it says."""

import json
import logging
import re
import shlex
from pathlib import Path

import pytest

from skyrl.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "rl-with-my-environment.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


COMMANDS = [shlex.split(line)[1:] for line in "".join(blocks("bash")).replace("\\\n", " ").splitlines()]


def metrics() -> list[dict]:
    return [json.loads(line) for line in Path("digits/checkpoints/metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working directory with the files of the page."""
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers[:])
    Path("prompts.jsonl").write_text(blocks("json")[0])
    Path("digits_env.py").write_text(blocks("python")[0])
    return tmp_path


@pytest.fixture
def run(folder):
    """Run the commands of the page, with another last step, which is also the step that is printed."""
    made, check, train, rollouts = COMMANDS

    def run(steps: int) -> None:
        given = [word.replace("max_steps=20", f"max_steps={steps}") for word in train]
        shown = [word if word != "20" else str(steps) for word in rollouts]
        assert main(made) == 0 and main(check) == 0 and main([*given, "trainer.strategy=torch"]) == 0
        assert main(shown) == 0

    return run


def test_the_environment_of_the_page_answers_as_the_page_says(folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(folder)
    program = blocks("python")[1]
    exec(program, {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print.*  # (.*)$", program, re.MULTILINE)


def test_the_page_trains_in_its_environment_and_leaves_its_files(run, capfd):
    run(1)
    printed = capfd.readouterr().out
    last = re.search(r"steps are taken\n(.*?)```", PAGE, re.DOTALL)[1].replace("global_step_20", "global_step_1")  # type: ignore[index]
    assert last in printed and "step 1: 64 samples, mean reward 0" in printed
    for folder in re.findall(r"digits/\S+", last):
        assert Path(folder).exists(), folder


@pytest.mark.slow
def test_the_policy_of_the_page_learns_to_write_digits(run):
    run(20)
    rewards = [step["reward/avg_raw_reward"] for step in metrics()]
    assert rewards[0] < 0.05 and rewards[-1] > 0.5
