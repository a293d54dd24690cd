"""Tests that one process of a parallel run executes consecutively: those of a file, or the kit's tests of one backend.

Opening a backend with several processes takes longer than most of its tests.
"""

import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

KIT = "tests/conformance/"


def unit(nodeid: str) -> str:
    """Name of the group of tests that run in one process: the file, or in the kit, the backend in the test's case."""
    file, _, test = nodeid.partition("::")
    _, parametrized, case = test.partition("[")
    return f"{KIT}[{case.rstrip(']').partition('-')[0]}]" if file.startswith(KIT) and parametrized else file


class Scheduling(LoadFileScheduling):
    """Distribution of these groups to the processes of `--dist loadfile`."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> Scheduling | None:
    """Replace xdist's distribution by files."""
    return Scheduling(config, log) if config.option.dist == "loadfile" else None
