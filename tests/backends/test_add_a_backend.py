"""docs/add-a-backend.md names every member of the contract, and no other."""

import re
from pathlib import Path

from skyrl.backends.backend import AbstractBackend
from skyrl.backends.executor import Executor

PAGE = Path(__file__).parents[2] / "docs" / "add-a-backend.md"


def table(heading: str) -> set[str]:
    """Names in the first column of the table with this heading."""
    rows = PAGE.read_text().split(f"| {heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [row.split("|")[1] for row in rows]
    return {name for cell in cells for name in re.findall(r"`(\w+)", cell)}


def members(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_page_has_every_member_that_the_engine_and_the_trainers_use():
    assert table("member") == members(AbstractBackend) | {"base_model", "config"}


def test_the_page_has_every_hook_of_the_executor():
    declared = members(Executor) | set(Executor.__annotations__)
    assert table("hook") | table("call") == declared - members(AbstractBackend) - {"begin", "on_answer"}
