"""Pytest plugin that records each failure for `tests/run.py`, which decides whether it counts.

Load it with `-p tests.failures` and name the file in `SKYRL_TEST_FAILURES`. Each line of the file is one `Failure` as
JSON. Processes of xdist send their failures to the controller inside test reports.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest

FILE = "SKYRL_TEST_FAILURES"
"""Environment variable: the file that failures are appended to."""
PROPERTY = "skyrl-failure"


class Failure(NamedTuple):
    """One failed phase of a test, or a failed collection."""

    test: str
    """Node id."""
    kind: str
    """`wrong` (an assertion or a missing exception), `late` (a wait ran out), `error`, `crash` or `collection`."""
    exact: bool
    """The test is marked `exact`."""
    exception: str
    """Type and first line of the message."""
    seconds: float


def read(file: Path) -> list[Failure]:
    """Failures in the order in which they were reported."""
    return [Failure(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def kind_of(error: BaseException) -> str:
    """Kind of an exception that a test raised."""
    if isinstance(error, pytest.fail.Exception):
        return "late" if str(error).startswith("Timeout") else "wrong"  # pytest-timeout fails with "Timeout (>300.0s)"
    if isinstance(error, AssertionError):
        return "wrong"
    names = {kind.__name__ for kind in type(error).__mro__}
    return "late" if names & {"TimeoutError", "TimeoutExpired", "TimeoutException"} else "error"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note kind and exception in the report of a failed phase, where the test ran."""
    report = yield
    if report.failed and call.excinfo is not None:
        error = call.excinfo.value
        first = (str(error).strip().splitlines() or [""])[0]
        exact = item.get_closest_marker("exact") is not None
        told = {"kind": kind_of(error), "exact": exact, "exception": f"{type(error).__name__}: {first}"[:500]}
        report.user_properties.append((PROPERTY, told))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a failed phase. A report without a note and of no phase is xdist's own: a process has crashed."""
    if report.failed:
        crash = {"kind": "crash", "exact": False, "exception": "the process that ran it has crashed"}
        passed = {"kind": "wrong", "exact": True, "exception": report.longreprtext}  # an xfail that is strict
        told = dict(report.user_properties).get(PROPERTY, passed if report.when == "call" else crash)
        _append(Failure(test=report.nodeid, seconds=round(report.duration, 2), **told))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Append a file that cannot be collected."""
    if report.failed:
        last = (report.longreprtext.strip().splitlines() or [""])[-1]
        _append(Failure(report.nodeid, "collection", False, last[:500], 0.0))


def _append(failure: Failure) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ[FILE], "a") as file:
            file.write(json.dumps(failure._asdict()) + "\n")
