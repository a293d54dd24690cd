"""Sizes of the test suite, as `tests/selection.toml` decides them.

`make test` leaves tests marked `full` to `make test-all`. The mark is not in the tests themselves.
"""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

FILE = Path(__file__).parent / "selection.toml"
SECONDS = Path(__file__).parent / "seconds.txt"


class Selection(NamedTuple):
    """Patterns of node ids below `tests/`: a folder, a file, a test or a case, in which `*` stands for any text."""

    limit_s: float
    keep: list[str]
    full: list[str]

    @classmethod
    def read(cls) -> "Selection":
        """Read `tests/selection.toml`."""
        return cls(**tomllib.loads(FILE.read_text()))

    def is_full(self, nodeid: str) -> bool:
        """Return True for tests of `make test-all` only."""
        is_slow = seconds().get(nodeid, 0) > self.limit_s
        return (is_slow or _any(self.full, nodeid)) and not _any(self.keep, nodeid)

    def mark(self, items: list[pytest.Item]) -> None:
        """Add the mark `full`."""
        for item in items:
            if self.is_full(item.nodeid):
                item.add_marker("full")


@cache
def seconds() -> dict[str, float]:
    """Seconds of the tests that take over half a second, by node id, as `make seconds` measured them."""
    lines = (line.split(" ", 1) for line in SECONDS.read_text().splitlines())
    return {nodeid: float(took) for took, nodeid in lines}


@cache
def pattern_of(line: str) -> re.Pattern[str]:
    """Pattern of a line. A folder stands for its files, a file for its tests, a test for its cases."""
    text = ".*".join(re.escape(part) for part in line.split("*"))
    return re.compile(rf"tests/{text}(/.*|::.*|\[.*)?", re.DOTALL)


def _any(lines: list[str], nodeid: str) -> bool:
    return any(pattern_of(line).fullmatch(nodeid) for line in lines)
