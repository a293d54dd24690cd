"""A database that fails now and then: one of N reads or writes is refused, the answer to one of N commits is lost.

The errors are the driver's own (`sqlite3`, `psycopg`), raised where SQLAlchemy calls it, so what the server sees is
what it sees of a real database. `Faults` are in force in this process while its block lasts.
"""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Faults:
    """Frequencies of faults; 0: never."""

    reads: int = 0
    """One of so many SELECTs."""
    writes: int = 0
    """One of so many INSERTs, UPDATEs and DELETEs."""
    answers: int = 0
    """One of so many commits takes effect without an answer."""


class FailingDatabase:
    """Counts what is asked of databases, and makes it fail."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def next_fails(self, kind: str) -> bool:
        every = getattr(self.faults, kind)
        fails = every > 0 and _fails(kind, *divmod(self.done[kind], every), every)
        self.done[kind] += 1
        self.failed[kind] += fails
        return fails

    def before_cursor_execute(self, connection: Any, cursor: Any, statement: str, *_: object) -> None:
        verb = statement.lstrip().partition(" ")[0].upper()
        kind = "reads" if verb == "SELECT" else "writes" if verb in ("INSERT", "UPDATE", "DELETE") else None
        if kind is not None and self.next_fails(kind):
            raise connection.dialect.dbapi.OperationalError(f"injected: one of its {kind} fails")


def _fails(kind: str, block: int, place: int, every: int) -> bool:
    """One of each `every`, at a place that is drawn: a loop of as many reads would meet it at the same one for ever."""
    return place == random.Random(f"{kind} {block}").randrange(every)


_DATABASE = FailingDatabase()


def _install() -> None:
    """Once for a process. SQLAlchemy is imported only where databases are to fail."""
    from sqlalchemy import Engine, event
    from sqlalchemy.engine.default import DefaultDialect

    if event.contains(Engine, "before_cursor_execute", _DATABASE.before_cursor_execute):
        return
    event.listen(Engine, "before_cursor_execute", _DATABASE.before_cursor_execute)
    commit = DefaultDialect.do_commit

    def do_commit(self: Any, connection: Any) -> None:
        commit(self, connection)
        if _DATABASE.next_fails("answers"):
            raise self.dbapi.OperationalError("injected: the answer to a commit is lost")

    DefaultDialect.do_commit = do_commit  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def failing(**faults: int) -> Iterator[FailingDatabase]:
    """Databases of this process fail in this block."""
    _install()
    _DATABASE.done.clear()
    _DATABASE.failed.clear()
    _DATABASE.faults = Faults(**faults)
    try:
        yield _DATABASE
    finally:
        _DATABASE.faults = Faults()
