"""The demo of RL in a much smaller form: it goes through and leaves what its summary names."""

import contextlib
import dataclasses
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from skyrl.demos.learn_to_add import Settings, as_example, main, summarize
from skyrl.demos.rl_report import Files
from skyrl.train.tracking.tracker import read_metrics

pytestmark = pytest.mark.full

SMALL = Settings(
    training_problems=16,
    heldout_problems=8,
    hidden=32,
    warm_batch_size=8,
    warm_steps=2,
    batch_size=8,
    samples=4,
    epochs=1,
    least_gain=-1.0,
)
STEPS = 2


class Ended(NamedTuple):
    """A demo that is over."""

    code: int
    folder: Path
    said: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Ended:
    folder = tmp_path_factory.mktemp("demo") / "out"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(["--output", str(folder / ".." / "out")], SMALL)
    return Ended(code, folder, said.getvalue())


def test_the_demo_goes_through_in_a_folder_whose_name_has_dots_in_it(ended):
    assert ended.code == 0


def test_the_summary_says_how_many_heldout_sums_are_right_before_and_after(ended):
    metrics = [json.loads(line) for line in (ended.folder / "rl/checkpoints/metrics.jsonl").read_bytes().splitlines()]
    before, after = (row["eval/all/avg_score"] for row in (metrics[0], metrics[-1]))
    assert [row["step"] for row in metrics] == [0, 1, STEPS]
    assert f"Held-out sums right: {before:.1%} before RL, {after:.1%} after." in ended.said


def test_the_summary_names_files_that_are_there(ended):
    named = [Path(line.split()[-1]) for line in ended.said.splitlines() if str(ended.folder) in line]
    assert [path.name for path in named] == ["reward.png", "dumped_rollouts", "rollouts.txt"]
    assert all(path.exists() for path in named)


@pytest.mark.parametrize(("called_from", "shown"), [("out", "rollouts.txt"), ("beside", "{folder}/rollouts.txt")])
def test_files_are_named_from_the_folder_that_it_is_called_from_or_in_full(
    ended, called_from, shown, capsys, monkeypatch
):
    place = ended.folder.parent / called_from
    place.mkdir(exist_ok=True)
    monkeypatch.chdir(place)
    summarize(Files(ended.folder), read_metrics(ended.folder / "rl/checkpoints"), 1.0)
    assert f" {shown.format(folder=ended.folder.resolve())}\n" in capsys.readouterr().out


def test_the_plot_is_a_png(ended):
    assert (ended.folder / "reward.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


WITHOUT_MATPLOTLIB = """
import sys
from pathlib import Path

class NotInstalled:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NotInstalled())
from skyrl.demos.learn_to_add import summarize
from skyrl.demos.rl_report import Files
from skyrl.train.tracking.tracker import read_metrics

folder = Path(sys.argv[1])
summarize(Files(folder), read_metrics(folder / "rl/checkpoints"), 1.0)
"""


def test_without_matplotlib_the_summary_says_so_and_names_the_rest(ended, tmp_path):
    folder = shutil.copytree(ended.folder, tmp_path / "out", ignore=shutil.ignore_patterns("reward.png"))
    command = [sys.executable, "-c", WITHOUT_MATPLOTLIB, str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "plot of the reward      left out, as matplotlib is missing: pip install 'skyrl[train]'" in said
    assert not (folder / "reward.png").exists()
    named = [Path(line.split()[-1]) for line in said.splitlines() if str(folder) in line]
    assert [path.name for path in named] == ["dumped_rollouts", "rollouts.txt"]


def test_each_step_leaves_a_line_for_each_answer(ended):
    for step in range(1, STEPS + 1):
        path = ended.folder / f"rl/dumped_rollouts/global_step_{step}.jsonl"
        assert len(path.read_bytes().splitlines()) == SMALL.batch_size * SMALL.samples


def test_the_readable_sample_has_every_problem_of_the_last_step(ended):
    lines = (ended.folder / f"rl/dumped_rollouts/global_step_{STEPS}.jsonl").read_bytes().splitlines()
    problems = {json.loads(line)["messages"][0]["content"] for line in lines}
    assert len(problems) == SMALL.batch_size
    last = (ended.folder / "rollouts.txt").read_text().split("Sampled in the last step:")[1].split("\n\n")[0]
    assert problems == {line.split()[0] for line in last.strip().splitlines()}


def test_training_and_heldout_problems_are_different_ones(ended):
    shown, heldout = (
        {json.loads(line)["prompt"][0]["content"] for line in (ended.folder / name).read_bytes().splitlines()}
        for name in ("problems.jsonl", "heldout.jsonl")
    )
    assert len(shown) == SMALL.training_problems and len(heldout) == SMALL.heldout_problems
    assert not shown & heldout


def test_the_demo_goes_through_on_torch_too(tmp_path, capsys):
    assert main(["--output", str(tmp_path / "out")], dataclasses.replace(SMALL, backend="skyrl_train")) == 0
    assert "Held-out sums right: " in capsys.readouterr().out


def test_a_folder_that_is_in_use_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    assert main(["--output", str(tmp_path)], SMALL) == 1
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("below", ["file", "file/out"])
def test_a_folder_that_cannot_be_written_to_is_one_message_and_status_1(tmp_path, capsys, below):
    (tmp_path / "file").touch()
    assert main(["--output", str(tmp_path / below)], SMALL) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path / below} cannot be written to (") and len(said.splitlines()) == 1


def test_what_cannot_be_run_is_one_message_and_status_1(tmp_path, capsys):
    assert main(["--output", str(tmp_path / "out")], dataclasses.replace(SMALL, epochs=0)) == 1
    assert capsys.readouterr().err == "The demo failed: trainer.epochs=0: give a number above 0\n"


@pytest.mark.parametrize(
    ("problem", "right", "careless"), [("47+15=", "62", "52"), ("42+15=", "57", "57"), ("45+15=", "60", "50")]
)
def test_a_careless_teacher_forgets_to_carry_and_nothing_else(problem, right, careless):
    row = {"prompt": [{"role": "user", "content": problem}], "reward_spec": {"ground_truth": right}}
    answers = [as_example(row, careless=forgets)["messages"][-1]["content"] for forgets in (False, True)]
    assert answers == [right, careless]
