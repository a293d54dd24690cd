"""Tests that one process of a parallel run executes in a row: those of a file, or the kit's tests of one backend.

Opening a backend of several processes takes longer than most tests of it.
"""

import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

KIT = "tests/conformance/"


def unit(nodeid: str) -> str:
    """Name of the tests that run in one process: the file, or of the kit the backend that the test's case names."""
    file, _, test = nodeid.partition("::")
    _, parametrized, case = test.partition("[")
    return f"{KIT}[{case.rstrip(']').partition('-')[0]}]" if file.startswith(KIT) and parametrized else file


class Scheduling(LoadFileScheduling):
    """Distribution of units to the processes of `--dist loadfile`."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> Scheduling | None:
    """Take the place of xdist's distribution by files."""
    return Scheduling(config, log) if config.option.dist == "loadfile" else None
