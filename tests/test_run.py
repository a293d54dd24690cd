"""Planted failures in suites of their own, run as `make test` runs this one: reruns, and what a run leaves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run import ROOM
from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[1]
ONCE = """
import pathlib, pytest, socket, subprocess, time

def first(name):
    flag = pathlib.Path(name)
    if flag.exists():
        return False
    flag.touch()
    return True

"""
"""Start of a planted file: `first` is true once only."""


COMMAND = [sys.executable, "-m", "tests.run", "-q", "-p", "no:cacheprovider"]


def environment(folder: Path) -> dict[str, str]:
    """Variables of a run in a folder, with the plugins that it needs: loading all of them takes a second each time."""
    own = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder)}
    names = "xdist.plugin,pytest_timeout,pytest_rerunfailures"
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": names}
    given = {name: value for name, value in os.environ.items() if name not in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS")}
    return given | own | plugins


def run(folder: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a planted test as a suite of its own."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_planted.py").write_text(ONCE + test)
    command = [*COMMAND, *options]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=BOUND_S)
    assert not list(folder.glob(f"{ROOM}*"))
    return done


def test_a_hang_that_does_not_repeat_is_reported_as_a_rerun(tmp_path):
    done = run(tmp_path, "def test_it():\n    if first('a'):\n        time.sleep(3600)", "-o", "timeout=1", "-n", "1")
    assert done.returncode == 0 and "1 passed, 1 rerun" in done.stdout
    assert "Timeout (>1.0s)" in done.stdout


def test_a_port_that_is_taken_once_is_a_rerun(tmp_path):
    body = """
def test_it():
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as other:
        other.bind(("127.0.0.1", taken.getsockname()[1] if first("a") else 0))
"""
    assert run(tmp_path, body).returncode == 0


@pytest.mark.parametrize(
    "wrong",
    [
        "assert not first('a')",
        "with pytest.raises(ValueError):\n        int('1' if first('a') else 'a')",
    ],
)
def test_a_wrong_value_is_final(tmp_path, wrong):
    done = run(tmp_path, f"def test_it():\n    {wrong}")
    assert done.returncode == 1 and "rerun" not in done.stdout.splitlines()[-1]


@pytest.mark.full
def test_processes_that_tests_leave_are_killed(tmp_path):
    body = (
        "def test_it():\n    path = pathlib.Path('pid')\n    path.write_text(str(subprocess.Popen(['sleep', '3600'], "
    )
    body += "start_new_session=True).pid))"
    assert run(tmp_path, body).returncode == 0
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


@pytest.mark.full
def test_a_run_that_is_interrupted_names_what_failed_and_leaves_nothing(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    planted = "import time\ndef test_a():\n    assert 0\ndef test_b():\n    print('begun')\n    time.sleep(3600)\n"
    (tmp_path / "test_planted.py").write_text(planted)
    given = environment(tmp_path)
    with subprocess.Popen([*COMMAND, "-s"], cwd=tmp_path, env=given, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "begun" not in (line := process.stdout.readline()):
            assert line
        process.terminate()
        assert process.wait(BOUND_S) != 0
        left = process.stdout.read()  # which ends, as nobody has the other end any more
    assert "FAILED test_planted.py::test_a" in left
    assert not list(tmp_path.glob(f"{ROOM}*"))
