"""The pages about RL with environments and tools of one's own run as they stand and do what they say."""

import json
import logging
import re
import shlex
from pathlib import Path

import pytest

from skyrl.cli import main

PAGE, TOOLS = (
    (Path(__file__).parents[2] / "docs" / f"rl-with-my-{name}.md").read_text() for name in ("environment", "tools")
)


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """The arguments of the page's commands."""
    return [shlex.split(line)[1:] for line in "".join(blocks("bash", page)).replace("\\\n", " ").splitlines()]


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
    made, check, train, rollouts = commands(PAGE)

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


@pytest.fixture
def with_tools(tmp_path, monkeypatch):
    """Run the commands of the page about tools, with other numbers of steps. Returns the metrics of the RL run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers[:])
    environment, data = blocks("python", TOOLS)
    Path("prices_env.py").write_text(environment)
    program, made, check, sft, rl, rollouts = commands(TOOLS)
    assert program == ["make_data.py"]

    def run(warm: int, steps: int) -> list[dict]:
        exec(data, {})
        assert main(made) == 0 and main(check) == 0
        assert main([word.replace("num_steps=100", f"num_steps={warm}") for word in sft]) == 0
        given = [word.replace("max_steps=10", f"max_steps={steps}") for word in rl]
        assert main([*given, "trainer.strategy=torch"]) == 0
        assert main([word if word != "10" else str(steps) for word in rollouts]) == 0
        return [json.loads(line) for line in Path("rl/checkpoints/metrics.jsonl").read_text().splitlines()]

    return run


def test_the_page_about_tools_shows_them_and_trains(with_tools, capfd):
    with_tools(1, 1)
    shown = capfd.readouterr().out
    assert '"name": "price", "description": "Look up a price."' in shown and "step 1: 64 samples" in shown


@pytest.mark.slow
def test_the_policy_of_the_page_about_tools_learns_to_call_them(with_tools):
    first, *_, last = [step["reward/avg_raw_reward"] for step in with_tools(100, 10)]
    assert first < 0.9 < last
