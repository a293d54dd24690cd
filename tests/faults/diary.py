"""Record of what the clients of a run saw, in the order in which they saw it, and a way to wait for more of it.

An entry is (what, value): values are numbers, texts, arrays, or lists and dicts of them. Ids differ between runs, so
`same_in_every_run` takes them out of texts.
"""

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

Entry = tuple[str, Any]


class Diary:
    """Entries of several clients, each in a thread of its own."""

    def __init__(self, clients: list[str]):
        self.entries: dict[str, list[Entry]] = {name: [] for name in clients}
        self.rounds = dict.fromkeys(clients, 0)
        """Rounds that each client has begun."""
        self._news = threading.Condition()
        self._failure: str | None = None

    def note(self, client: str, what: str, value: Any) -> None:
        """Write down something that a client was answered."""
        with self._news:
            self.entries[client].append((what, same_in_every_run(value)))
            self._news.notify_all()

    def fail(self, client: str, trace: str) -> None:
        """A client got an exception that it should not have got."""
        with self._news:
            self._failure = self._failure or f"client {client!r} failed:\n{trace}"
            self._news.notify_all()

    def check(self) -> None:
        """Raise if a client has failed."""
        assert self._failure is None, self._failure

    def counts(self) -> dict[str, int]:
        """Return the number of entries of each client."""
        with self._news:
            return {client: len(entries) for client, entries in self.entries.items()}

    def wait_for_news(self, before: dict[str, int], of_all: bool, timeout_s: float, say: Callable[[], str]) -> float:
        """Return once clients have written more than `before`: all of them, or any. Returns the seconds it took.

        Args:
            before: As `counts` gave it.
            of_all: Wait for every client rather than one.
            timeout_s: Fail after so long.
            say: Adds to the failure's message.
        """
        start = time.monotonic()
        quantifier = all if of_all else any

        def is_there() -> bool:
            return self._failure is not None or quantifier(len(self.entries[name]) > before[name] for name in before)

        with self._news:
            came = self._news.wait_for(is_there, timeout_s)
        self.check()
        assert came, f"nothing new in {timeout_s:.0f} s: {before} before, {self.counts()} now\n{say()}"
        return time.monotonic() - start


def same_in_every_run(value: Any) -> Any:
    """The value with ids taken out of its texts."""
    if isinstance(value, str):
        return _UUID.sub("*", value)
    if isinstance(value, dict):
        return {name: same_in_every_run(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [same_in_every_run(child) for child in value]
    return value


def differences(ours: Any, theirs: Any, tolerance: float, where: str = "") -> list[str]:
    """Return the places where values differ: at all for `tolerance` 0, else by more than it (relative or absolute)."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        children = [(f"{where}.{name}", child, theirs[name]) for name, child in ours.items()]
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        children = [(f"{where}[{n}]", one, other) for n, (one, other) in enumerate(zip(ours, theirs, strict=True))]
    else:
        return [] if _equal(ours, theirs, tolerance) else [f"{where}: {_shown(ours)} != {_shown(theirs)}"]
    return [text for place, one, other in children for text in differences(one, other, tolerance, place)]


def _equal(ours: Any, theirs: Any, tolerance: float) -> bool:
    if not isinstance(ours, np.ndarray | float | int) or not isinstance(theirs, np.ndarray | float | int):
        return ours == theirs
    one, other = np.asarray(ours), np.asarray(theirs)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if tolerance and one.dtype.kind == "f":
        return np.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 300 else f"{text[:300]}..."
