"""Planted failures, and which of them count: suites of their own, run as `make test` runs this one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run import ROOM
from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[1]
ONCE = """
import os, pathlib, pytest, socket, subprocess, time

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
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout"}
    given = {name: value for name, value in os.environ.items() if name not in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS")}
    return given | own | plugins


def run(folder: Path, *tests: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run planted tests as a suite of their own."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = exact\n")
    (folder / "test_planted.py").write_text(ONCE + "\n".join(tests))
    command = [*COMMAND, *options]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=BOUND_S)
    assert not list(folder.glob(f"{ROOM}*"))
    return done


def flaky(folder: Path) -> dict[str, str]:
    """Exceptions of tests on the list, by test."""
    lines = (folder / "build" / "flaky.jsonl").read_text().splitlines()
    return {line["test"]: line["exception"] for line in map(json.loads, lines)}


def test_a_hang_that_does_not_repeat_is_flaky(tmp_path):
    done = run(tmp_path, "def test_it():\n    if first('a'):\n        time.sleep(3600)", options=("-o", "timeout=1"))
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "flaky: 1"
    assert flaky(tmp_path) == {"test_planted.py::test_it": "Failed: Timeout (>1.0s) from pytest-timeout."}


def test_a_wrong_value_that_does_not_repeat_is_flaky_unless_its_test_is_exact(tmp_path):
    wrong = "def test_{0}():\n    assert not first('{0}')\n"
    assert run(tmp_path, wrong.format("a"), wrong.format("b")).stdout.endswith("flaky: 2\n")
    done = run(tmp_path, "@pytest.mark.exact\n" + wrong.format("c"))
    assert done.returncode == 1
    assert "final: test_planted.py::test_c: wrong: AssertionError" in done.stdout
    assert "runs again" not in done.stdout


def test_a_wait_that_runs_out_in_an_exact_test_is_tried_again(tmp_path):
    late = (
        "@pytest.mark.exact\ndef test_it():\n    if first('a'):\n        raise subprocess.TimeoutExpired('true', 1)\n"
    )
    assert run(tmp_path, late).stdout.endswith("flaky: 1\n")


def test_a_port_that_is_taken_once_is_flaky(tmp_path):
    body = """
def test_it():
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as other:
        other.bind(("127.0.0.1", taken.getsockname()[1] if first("a") else 0))
"""
    assert run(tmp_path, body).returncode == 0
    assert "Address already in use" in flaky(tmp_path)["test_planted.py::test_it"]


def test_a_test_that_passes_though_it_is_expected_to_fail_counts_as_wrong(tmp_path):
    done = run(tmp_path, "@pytest.mark.xfail(strict=True)\ndef test_it():\n    pass")
    assert done.returncode == 1 and "final: test_planted.py::test_it: wrong: [XPASS(strict)]" in done.stdout


@pytest.mark.parametrize("fails", [1, 2])
def test_a_test_has_to_pass_each_time_that_it_runs_again(tmp_path, fails):
    flags = " or ".join(f"first('{number}')" for number in range(1 + fails))
    assert run(tmp_path, f"def test_it():\n    assert not ({flags})").returncode == 1
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        ("def test_it():\n    os._exit(3) if first('a') else None", "crash"),
        ("import nowhere", "collection"),
        ("@pytest.mark.parametrize('n', range(11))\ndef test_it(n):\n    assert not first(str(n))", "11 tests failed"),
    ],
)
def test_what_is_final_runs_once(tmp_path, planted, reason):
    done = run(tmp_path, planted, options=("-n", "1"))
    assert done.returncode != 0
    assert "final: " in done.stdout and reason in done.stdout.rpartition("final: ")[2]
    assert "runs again" not in done.stdout


def test_processes_that_tests_leave_are_killed(tmp_path):
    body = (
        "def test_it():\n    path = pathlib.Path('pid')\n    path.write_text(str(subprocess.Popen(['sleep', '3600'], "
    )
    body += "start_new_session=True).pid))"
    assert run(tmp_path, body).returncode == 0
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


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
    assert left.endswith("interrupted; failed so far:\n  test_planted.py::test_a\n")
    assert not list(tmp_path.glob(f"{ROOM}*"))
