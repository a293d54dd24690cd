"""The quick start of docs/rl.md runs as it stands and does what it says."""

import json
import logging
import re
from pathlib import Path

import pytest

from skyrl.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "rl.md").read_text().split("\n## The demo\n")[0]


def block(language: str) -> str:
    """The first block of the page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[0]


COMMANDS = [
    line.split()[1:]
    for text in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in text.replace("\\\n", " ").splitlines()
]


def metrics() -> list[dict]:
    return [json.loads(line) for line in Path("digits/checkpoints/metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the commands of the page in a folder of their own, with further overrides and another last step to show."""
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers[:])
    Path("prompts.jsonl").write_text(block("json"))
    Path("rewards.py").write_text(block("python"))
    made, train, rollouts = COMMANDS

    def run(steps: int) -> None:
        given = [word.replace("max_steps=20", f"max_steps={steps}") for word in train]
        shown = [word if word != "20" else str(steps) for word in rollouts]
        assert main(made) == 0 and main([*given, "trainer.strategy=fsdp2"]) == 0 and main(shown) == 0

    return run


def test_the_page_trains_with_its_reward_and_leaves_its_files(run, capfd):
    run(1)
    printed = capfd.readouterr().out
    last = block("text").split("steps are taken\n")[1].replace("global_step_20", "global_step_1")
    assert last in printed and "step 1: 64 samples, mean reward 0" in printed
    for folder in re.findall(r"digits/\S+", last):
        assert Path(folder).exists(), folder


@pytest.mark.slow
def test_the_policy_of_the_page_learns_to_write_digits(run):
    run(20)
    rewards = [step["reward/avg_raw_reward"] for step in metrics()]
    assert rewards[0] < 0.05 and rewards[-1] > 0.5
