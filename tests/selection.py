"""Selection of `make test`: it leaves tests marked `full` to `make test-all`, but for cases marked `gate`.

@pytest.mark.full                           all cases
@pytest.mark.full("jax", "tied-bfloat16")   cases with this id, this beginning or this part between hyphens
@pytest.mark.gate("torch-tied")             such cases stay in `make test`
"""

import pytest


def in_gate(item: pytest.Item) -> bool:
    """Return True if `make test` runs a test, unless it is marked `slow`."""
    case = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
    return _covers(item, "gate", case) or not _covers(item, "full", case)


def unmark(items: list[pytest.Item]) -> None:
    """Take the mark `full` from cases that it does not cover, or that stay in `make test`."""
    for item in items:
        if in_gate(item):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "full"]


def _covers(item: pytest.Item, name: str, case: str) -> bool:
    return any(not mark.args or any(_names(part, case) for part in mark.args) for mark in item.iter_markers(name))


def _names(part: str, case: str) -> bool:
    return case == part or case.startswith(f"{part}-") or part in case.split("-")
