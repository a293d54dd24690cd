"""`skyrl runs` prints what is in the files of a run, which are read here by json."""

import json
import re
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image
from short_runs import command, train

from skyrl.cli import main
from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model) -> Path:
    """Two runs: `a`, and `b`, whose second step is another."""
    folder = tmp_path_factory.mktemp("runs")
    write_rows(folder / "rows.jsonl", ({"prompt": row["prompt"]} for row in arithmetic_rows(12, seed=0, largest=9)))
    options = ["environment.env_class=rewarding:Hashed", "trainer.dump_data_batch=true", "trainer.max_ckpts_to_keep=2"]
    train(command(folder / "rows.jsonl", tiny_model, folder / "a", *options, "trainer.epochs=1"))
    shutil.copytree(folder / "a", folder / "b")
    rows = [json.loads(line) for line in (folder / "b/metrics.jsonl").read_text().splitlines()]
    rows[1]["policy/entropy"] = 123.25
    (folder / "b/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    return folder


def said(capsys, *arguments: object) -> str:
    capsys.readouterr()
    assert main(["runs", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def rewards(folder: Path, step: int) -> list[float]:
    lines = (folder / f"a-exports/dumped_rollouts/global_step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line)["reward"] for line in lines]


@pytest.mark.full
def test_runs_are_listed_with_their_steps_and_scores(folder, capsys):
    head, *runs = said(capsys, "list", folder).splitlines()
    assert head.split() == ["algorithm", "step", "checkpoint", "written", "reward", "eval", "run"]
    reward = f"{statistics.fmean(rewards(folder, STEPS)):.4g}"
    assert [re.sub(r"\d+ \w+ ago", "", line).split() for line in runs] == [
        ["grpo", "3", "3", reward, "-", "a"],
        ["grpo", "2", "3", f"{statistics.fmean(rewards(folder, 2)):.4g}", "-", "b"],
    ]
    assert max(map(len, [head, *runs])) <= 80


def test_a_run_is_shown_with_what_it_was_told_and_nothing_else(folder, capsys):
    shown = said(capsys, "show", folder / "a")
    assert "checkpoints of steps: 2, 3" in shown
    for setting in ("trainer.policy.optimizer_config.lr=0.01", 'environment.env_class="rewarding:Hashed"'):
        assert f"  {setting}\n" in shown
    assert "trainer.algorithm.advantage_estimator" not in shown and "trainer.seed" not in shown
    last = json.loads((folder / "a/metrics.jsonl").read_text().splitlines()[-1])
    assert re.search(rf"^  policy/entropy +{last['policy/entropy']:.4g}$", shown, re.MULTILINE)
    assert "timing/step" not in shown and "timing/step" in said(capsys, "show", folder / "a", "--all")


@pytest.mark.parametrize(("option", "reverse"), [("--best", True), ("--worst", False)])
def test_the_best_and_the_worst_samples_of_a_step_come_first(folder, capsys, option, reverse):
    printed = said(capsys, "rollouts", folder / "a", "--step", 2, option, "--count", 5)
    found = [float(reward) for reward in re.findall(r"^=== \S+: reward (\S+),", printed, re.MULTILINE)]
    expected = sorted(rewards(folder, 2), reverse=reverse)[:5]
    assert found == pytest.approx(expected, rel=1e-5) and len(set(rewards(folder, 2))) > 1


def test_samples_are_those_of_the_last_step_in_their_order_by_default(folder, capsys):
    printed = said(capsys, "rollouts", folder / "a", "--count", 99)
    assert printed.startswith("step 3: 12 samples")
    found = [float(reward) for reward in re.findall(r"^=== \S+: reward (\S+),", printed, re.MULTILINE)]
    assert found == pytest.approx(rewards(folder, 3), rel=1e-5)


def test_runs_are_compared_at_the_same_steps(folder, capsys):
    printed = said(capsys, "compare", folder / "a", folder / "b", "--metric", "policy/entropy")
    rows = [json.loads(line)["policy/entropy"] for line in (folder / "a/metrics.jsonl").read_text().splitlines()]
    one, two, three = (f"{value:.4g}" for value in rows)
    table = [line.split() for line in printed.splitlines()[-4:]]
    assert table == [["step", "[1]", "[2]"], ["1", one, one], ["2", two, "123.2"], ["3", three, "-"]]


FIRST, SECOND = (31, 119, 180), (255, 127, 14)
"""Colours of the first two lines of matplotlib's pictures."""


def colours(path: Path) -> tuple[int, int]:
    """Pixels of a picture in these colours."""
    pixels = np.round(image.imread(path)[..., :3] * 255).astype(int)
    return tuple(int((pixels == colour).all(-1).sum()) for colour in (FIRST, SECOND))


@pytest.mark.full
def test_metrics_of_runs_are_drawn_a_picture_for_each_metric_and_a_line_for_each_run(folder, capsys, tmp_path):
    asked = ["--metric", "policy/entropy", "--metric", "policy/loss", "--output", tmp_path]
    printed = said(capsys, "plot", folder / "a", folder / "b", *asked)
    assert printed.split() == [str(tmp_path / name) for name in ("policy-entropy.png", "policy-loss.png")]
    for path in map(Path, printed.split()):
        assert min(colours(path)) > 50
    (alone,) = said(capsys, "plot", folder / "a", "--metric", "policy/entropy", "--output", tmp_path / "one").split()
    assert colours(Path(alone))[0] > 50 and colours(Path(alone))[1] == 0


def test_of_many_steps_the_first_the_last_and_some_between_are_compared(folder, capsys):
    printed = said(capsys, "compare", folder / "a", "--metric", "policy/loss", "--rows", 2)
    assert [line.split()[0] for line in printed.splitlines()[-2:]] == ["1", "3"]


def test_rollouts_cannot_control_the_terminal(folder, capsys):
    dump = folder / "a-exports/dumped_rollouts/global_step_3.jsonl"
    before = dump.read_text()
    row = json.loads(before.splitlines()[0])
    row["turns"][0]["action"] = "\x1b[2J\x1b]0;title\x07"
    dump.write_text(json.dumps(row) + "\n")
    try:
        printed = said(capsys, "rollouts", folder / "a")
    finally:
        dump.write_text(before)
    assert "\x1b" not in printed and r"\x1b[2J\x1b]0;title\x07" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "."], "holds no metrics.jsonl; name the ckpt_path of a run"),
        (["list", "nowhere"], "nowhere is no folder"),
        (["rollouts", "a", "--step", "9"], "--step=9: there are rollouts of the steps 1, 2, 3"),
        (["compare", "a", "--metric", "policy/entrpy"], "--metric=policy/entrpy: no run has it; there are "),
        (["plot", "a", "--metric", "policy/entrpy"], "--metric=policy/entrpy: no run has it; there are "),
    ],
)
def test_what_is_not_there_is_told_in_a_line(folder, capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(folder)
    assert main(["runs", *arguments]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"skyrl runs {arguments[0]}: error: ") and words in told and told.count("\n") == 1
