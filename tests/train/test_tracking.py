"""Metrics: JSON lines always, and trackers that may fail or hang without training taking notice."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from skyrl.train.tracking.clients import TRACKERS, Console, RunInfo
from skyrl.train.tracking.tracker import CLOCK, METRICS_FILE, Tracker, TrackerClient, read_metrics
from tests.waiting import BOUND_S, until

RUN = RunInfo("a project/1", "run 1", "id1", {"trainer": {"lr": 0.5, "path": None}, "names": ["a"]})


def lines(folder: Path) -> list[dict[str, Any]]:
    """Rows without the time of each."""
    rows = [json.loads(line, parse_constant=refused) for line in (folder / METRICS_FILE).read_text().splitlines()]
    for row in rows:
        del row[CLOCK]
    return rows


def refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


class Kept:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.finished = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.logged.append((step, dict(metrics)))

    def finish(self) -> None:
        self.finished = True


class Faulty(Kept):
    """A tracker that does something else from its second step on, or when it is to finish."""

    def __init__(self, at_log: Callable[[], Any] = lambda: None, at_finish: Callable[[], Any] = lambda: None):
        super().__init__()
        self._at_log, self._at_finish = at_log, at_finish

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self.logged:
            self._at_log()
        super().log(metrics, step)

    def finish(self) -> None:
        self._at_finish()
        super().finish()


def fail() -> None:
    raise ConnectionError("the server is gone")


# -- JSON lines -------------------------------------------------------------------------------------------------------


def test_each_step_is_a_line_whatever_trackers_there_are(tmp_path):
    tracker = Tracker(tmp_path / "new", {})
    tracker.log({"policy/loss": 0.5}, 1)
    tracker.log({"policy/loss": 0.25}, 2)
    assert lines(tmp_path / "new") == [{"step": 1, "policy/loss": 0.5}, {"step": 2, "policy/loss": 0.25}]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), None),
        (float("inf"), None),
        (None, None),
        (np.float32("-inf"), None),
        (np.float32(0.5), 0.5),
        (np.array(0.5), 0.5),
        (ml_dtypes.bfloat16(0.5), 0.5),
        (np.int64(3), 3),
        (2**60 + 1, 2**60 + 1),
        (True, 1),
    ],
)
def test_numbers_of_any_library_are_written_and_what_is_none_as_null(tmp_path, value, written):
    Tracker(tmp_path, {}).log({"a": value}, 1)
    assert lines(tmp_path) == [{"step": 1, "a": written}]


def test_trackers_get_finite_numbers_only(tmp_path):
    kept = Kept()
    tracker = Tracker(tmp_path, {"kept": lambda: kept})
    tracker.log({"a": float("nan"), "b": None, "c": 1.5}, 1)
    tracker.finish()
    assert kept.logged == [(1, {"c": 1.5})]


def test_parts_of_a_step_become_one_line(tmp_path):
    tracker = Tracker(tmp_path, {})
    tracker.log({"a": 1}, 0)
    for name in ("b", "c"):
        tracker.log({name: 2}, 1)
    assert lines(tmp_path) == [{"step": 0, "a": 1}, {"step": 1, "b": 2, "c": 2}]


def logged(folder: Path, steps: list[int], name: str = "a", **options: Any) -> None:
    tracker = Tracker(folder, {}, **options)
    for step in steps:
        tracker.log({name: step}, step)
    tracker.finish()


def test_each_row_has_its_time(tmp_path):
    begun = time.time()
    logged(tmp_path, [1, 2])
    first, second = (row[CLOCK] for row in read_metrics(tmp_path))
    assert begun <= first <= second <= time.time()


def test_the_console_prints_every_nth_step_and_evaluations(capsys):
    console = Console(RUN._replace(log_interval=3))
    for step in range(1, 8):
        console.log({"eval/all/avg_score": 0.5} if step == 5 else {"policy/loss": 0.5}, step)
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["step 3", "step 5", "step 6"]


def test_a_resumed_run_goes_on_after_its_checkpoint_and_takes_no_step_twice(tmp_path):
    logged(tmp_path, [1, 2, 3, 4])
    logged(tmp_path, [2, 3], "b", resumed_step=2)
    assert lines(tmp_path) == [{"step": 1, "a": 1}, {"step": 2, "a": 2, "b": 2}, {"step": 3, "b": 3}]


def test_a_line_that_a_kill_cut_off_is_dropped_by_the_run_that_goes_on(tmp_path):
    logged(tmp_path, [1])
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 2, "a')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    logged(tmp_path, [2], resumed_step=2)
    assert lines(tmp_path) == [{"step": 1, "a": 1}, {"step": 2, "a": 2}]


@pytest.mark.parametrize("content", ['{"step": 1}\nnothing\n', '{"a": 1}\n', "[1]\n", "1\n"])
def test_a_file_of_something_else_is_kept_under_another_name(tmp_path, content):
    (tmp_path / METRICS_FILE).write_text(content)
    logged(tmp_path, [3], resumed_step=2)
    assert lines(tmp_path) == [{"step": 3, "a": 3}]
    assert (tmp_path / "metrics.1.jsonl").read_text() == content


def test_a_run_that_begins_anew_keeps_the_metrics_of_those_before_it(tmp_path):
    for name in "abc":
        logged(tmp_path, [1], name)
    files = {path.name: json.loads(path.read_text()).keys() - {"step", CLOCK} for path in tmp_path.iterdir()}
    assert files == {"metrics.1.jsonl": {"a"}, "metrics.2.jsonl": {"b"}, METRICS_FILE: {"c"}}


@pytest.mark.parametrize("resumed_step", [None, 1])
def test_a_folder_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path, caplog, resumed_step):
    (tmp_path / "file").touch()
    kept = Kept()
    tracker = Tracker(tmp_path / "file" / "below", {"kept": lambda: kept}, resumed_step=resumed_step)
    for step in (1, 2):
        tracker.log({"a": step}, step)
    tracker.finish()
    assert caplog.text.count("cannot be written") == 1
    assert [step for step, _ in kept.logged] == [1, 2]


FULL_DISK = """
import resource, sys
from skyrl.train.tracking.tracker import Tracker
tracker = Tracker(sys.argv[1], {})
tracker.log({"a": 1}, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (30, resource.RLIM_INFINITY))
tracker.log({"a": 2}, 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
tracker.log({"a": 3}, 3)
"""


def test_a_line_for_which_there_was_no_room_leaves_no_part_of_it(tmp_path):
    # The limit falls into the second line, so that the system takes a part of it.
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=BOUND_S
    )
    assert run.returncode == 0, run.stderr
    assert "cannot be written" in run.stderr
    assert lines(tmp_path) == [{"step": 1, "a": 1}, {"step": 3, "a": 3}]


# -- trackers that fail -----------------------------------------------------------------------------------------------


def track(
    folder: Path, client: Callable[[], TrackerClient], steps: int, timeout_s: float = BOUND_S, **options: Any
) -> Kept:
    """Log steps to a tracker and to a good one beside it; returns that."""
    good = Kept()
    tracker = Tracker(folder, {"poor": client, "good": lambda: good}, **options)
    for step in range(steps):
        tracker.log({"a": step}, step)
        until(lambda step=step: len(good.logged) > step, "the good one has the step, or it would be behind, too")
    tracker.finish(timeout_s)
    return good


@pytest.mark.parametrize(
    "client",
    [fail, lambda: Faulty(at_log=fail), lambda: Faulty(at_finish=fail), lambda: Faulty(at_log=sys.exit)],
    ids=["when it is made", "when it logs", "when it finishes", "by leaving"],
)
def test_a_tracker_that_fails_is_said_once_and_stops_nothing(tmp_path, caplog, client):
    good = track(tmp_path, client, 9)
    assert len(lines(tmp_path)) == len(good.logged) == 9
    assert good.finished
    assert caplog.text.count("tracker poor failed; the run goes on without it") == 1


def test_a_tracker_that_hangs_is_left_out_once_its_queue_is_full(tmp_path, caplog):
    hold = threading.Event()
    try:
        good = track(tmp_path, lambda: Faulty(at_log=hold.wait), 20, queue_length=8)
    finally:
        hold.set()
    assert len(lines(tmp_path)) == 20
    assert good.finished
    assert caplog.text.count("tracker poor hangs: it is 8 steps behind; the run goes on without it") == 1


@pytest.mark.full
def test_a_tracker_that_hangs_at_the_end_is_not_waited_for_longer_than_said(tmp_path, caplog):
    hold = threading.Event()
    try:
        good = track(tmp_path, lambda: Faulty(at_finish=hold.wait), 3, timeout_s=0.5)
        until(lambda: good.finished, "the good one has ended")
    finally:
        hold.set()
    assert caplog.text.count("tracker poor has not sent everything after 0.5 seconds") == 1


def test_a_tracker_is_made_called_and_ended_in_one_thread(tmp_path):
    threads = []

    class Noting(Kept):
        def __init__(self) -> None:
            super().__init__()
            threads.append(threading.get_ident())

        def log(self, metrics: Mapping[str, float], step: int) -> None:
            threads.append(threading.get_ident())

        def finish(self) -> None:
            threads.append(threading.get_ident())

    tracker = Tracker(tmp_path, {"noting": Noting})
    tracker.log({"a": 1}, 1)
    tracker.finish()
    assert len(threads) == 3 and set(threads) != {threading.get_ident()}
    assert len(set(threads)) == 1


# -- the trackers -----------------------------------------------------------------------------------------------------


METRICS = {"policy/loss": 0.123456, "policy/kl": 1e-9, "epoch": 2.0, "eval/all/score": 1.0}
DETAILS = {"generate/std_num_tokens": 1.0, "generate/trajectory_time_llm_p90": 2.0, "eval/unknown/score": 1.0}


def test_the_console_shows_a_step_of_few_metrics_in_one_line(capsys):
    TRACKERS["console"](RUN).log(METRICS | DETAILS, 7)
    assert capsys.readouterr().out == "step 7: epoch 2 | eval all/score 1 | policy kl 1e-09, loss 0.1235\n"


LIBRARY = '''
"""Stands in for a tracker's library: writes what it is called with."""
import json, os

def note(*call):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(call) + "\\n")

def noting(name):
    return lambda *args, **kwargs: note(name, args, kwargs)
'''
LIBRARIES = {
    "wandb.py": """
from standin import note, noting
class Run:
    log, finish = staticmethod(noting("log")), staticmethod(noting("finish"))
def init(**options):
    note("init", [], options)
    return Run()
""",
    "mlflow.py": """
from standin import noting
set_experiment, start_run, log_params = noting("set_experiment"), noting("start_run"), noting("log_params")
log_metrics, end_run = noting("log_metrics"), noting("end_run")
""",
    "swanlab.py": """
from standin import noting
init, log, finish = noting("init"), noting("log"), noting("finish")
""",
    "tensorboard/__init__.py": "",
    "tensorboard/summary.py": """
from standin import note, noting
class Writer:
    add_scalar, flush, close = (staticmethod(noting(name)) for name in ("add_scalar", "flush", "close"))
    def __init__(self, folder):
        note("Writer", [folder], {})
""",
}
SCRIPT = """
import sys
from skyrl.train.tracking.clients import RunInfo, tracker_clients
from skyrl.train.tracking.tracker import Tracker
run = RunInfo("a project/1", "run 1", "id1", {"trainer": {"lr": 0.5, "path": None}, "names": ["a"]})
tracker = Tracker(sys.argv[1], tracker_clients([sys.argv[2]], run))
tracker.log({"eval/pass@5": 0.5, "bad": float("nan")}, 3)
tracker.finish()
assert not {"wandb", "mlflow", "swanlab", "tensorboard"} - {sys.argv[2]} & set(sys.modules)
"""
CALLS = {
    "wandb": [
        ["init", [], {"project": "a_project_1", "name": "run 1", "id": "id1", "resume": "allow", "config": RUN.config}],
        ["log", [{"eval/pass@5": 0.5}], {"step": 3}],
        ["finish", [], {}],
    ],
    "mlflow": [
        ["set_experiment", ["a project/1"], {}],
        ["start_run", [], {"run_name": "run 1"}],
        ["log_params", [{"trainer.lr": "0.5", "trainer.path": "None", "names": "['a']"}], {}],
        ["log_metrics", [{"eval/pass_at_5": 0.5}], {"step": 3}],
        ["end_run", [], {}],
    ],
    "swanlab": [
        [
            "init",
            [],
            {"project": "a_project_1", "experiment_name": "run 1", "config": RUN.config, "mode": "offline"},
        ],
        ["log", [{"eval/pass@5": 0.5}], {"step": 3}],
        ["finish", [], {}],
    ],
    "tensorboard": [
        ["Writer", ["events/a_project_1/run_1"], {}],
        ["add_scalar", ["eval/pass@5", 0.5, 3], {}],
        ["flush", [], {}],
        ["close", [], {}],
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_tracker_calls_its_library_as_it_is_documented(tmp_path, name):
    """The real libraries took these calls: wandb 0.31, mlflow 3.17, swanlab 0.10, tensorboard 2.21."""
    library = tmp_path / "library"
    (library / "tensorboard").mkdir(parents=True)
    for file, content in {"standin.py": LIBRARY, **LIBRARIES}.items():
        (library / file).write_text(content)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("SWANLAB_", "WANDB_", "MLFLOW_"))},
        "PYTHONPATH": f"{library}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "CALLS": str(tmp_path / "calls"),
        "SWANLAB_MODE": "offline",
        "TENSORBOARD_DIR": "events",
    }
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), name]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND_S)
    assert (run.returncode, run.stderr) == (0, "")
    assert [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()] == CALLS[name]
