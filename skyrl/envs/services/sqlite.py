"""Execution of model-written queries on a read-only database, and comparison of query results.

A query can only read: the file is opened read-only, and SQLite's authorizer rejects all statements except SELECT and
the pragmas that describe tables. Time, rows and value sizes are limited.
"""

import re
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

MAX_ROWS = 100_000
"""Maximum number of rows of a result."""
MAX_CELL_BYTES = 2**18
"""Maximum length in bytes of a text, a blob, a row or a statement.

The time limit is not checked within an SQLite function, and some functions take quadratic time: half a second at this
length.
"""
MAX_RESULT_BYTES = 64_000_000
"""Maximum total size of texts (in characters) and blobs (in bytes) in a result."""
STEPS_BETWEEN_CHECKS = 10_000
"""Number of SQLite virtual machine instructions between two checks of the time limit: a few tenths of a millisecond."""

_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_PRAGMAS = {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list"}
_REFUSED_FUNCTIONS = {"load_extension", "fts3_tokenizer"}
_TOKEN = re.compile(
    r"'(?:[^']|'')*'" r'|"(?:[^"]|"")*"' r"|`(?:[^`]|``)*`|\[[^\]]*\]|--[^\n]*|/\*.*?(?:\*/|\Z)|[()]|\w+", re.DOTALL
)


class QueryFailed(Exception):
    """A query failed. The message may be shown to the model: it contains no file names."""


class Result(NamedTuple):
    """Result of a query."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    reads_tables: bool = True
    """True if the query reads from tables."""


def run_query(database: Path, sql: str, timeout_s: float) -> Result:
    """Run one SELECT on the SQLite file `database`, without changing it.

    Raises QueryFailed for a statement that is invalid, does more than read, exceeds the time limit or returns too much.
    """
    # No process writes to it, so no locks are needed. A file with a write-ahead log is read together with the log.
    immutable = "" if database.with_name(database.name + "-wal").exists() else "&immutable=1"
    deadline = time.monotonic() + timeout_s
    authorizer = _Authorizer()
    try:
        connection = sqlite3.connect(
            f"{database.resolve().as_uri()}?mode=ro{immutable}", uri=True, isolation_level=None, check_same_thread=False
        )
    except sqlite3.Error as error:
        raise QueryFailed(f"the database cannot be opened: {error}") from error
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(authorizer)
        connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS_BETWEEN_CHECKS)
        connection.text_factory = lambda data: data.decode("utf-8", "replace")
        return _fetch(connection.execute(sql), deadline)._replace(reads_tables=authorizer.reads_tables)
    # sqlite3.Warning, not a subclass of Error, means several statements; ValueError means a null character.
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        late = time.monotonic() > deadline
        raise QueryFailed(f"it took longer than {timeout_s:g} s" if late else str(error)) from error
    finally:
        connection.close()


def has_top_level_order(sql: str) -> bool:
    """Return True if `sql` orders its rows: ORDER BY outside of parentheses, identifiers and strings."""
    depth, before = 0, ""
    for token in _TOKEN.findall(sql):
        if token.startswith(("--", "/*")):
            continue
        depth += {"(": 1, ")": -1}.get(token, 0)
        word = token.lower()
        if depth == 0 and (before, word) == ("order", "by"):
            return True
        before = word
    return False


def same_result(gold_sql: str, gold: Result, other: Result) -> bool:
    """Return True if two results have equal rows. Their order counts only if the gold query has a top-level ORDER BY.

    Column names may differ; the number and order of columns must not. If the gold query reads tables, a query that only
    returns constants is not equal.
    """
    if len(gold.columns) != len(other.columns) or (gold.reads_tables and not other.reads_tables):
        return False
    if has_top_level_order(gold_sql):
        return gold.rows == other.rows
    return Counter(gold.rows) == Counter(other.rows)


class _Authorizer:
    """SQLite authorizer callback, called before each action of a statement."""

    def __init__(self):
        self.reads_tables = False

    def __call__(self, action: int, argument: str | None, detail: str | None, *_: str | None) -> int:
        self.reads_tables |= action == sqlite3.SQLITE_READ
        if action == sqlite3.SQLITE_PRAGMA:
            allowed = (argument or "").lower() in _PRAGMAS
        elif action == sqlite3.SQLITE_FUNCTION:
            allowed = (detail or "").lower() not in _REFUSED_FUNCTIONS
        else:
            allowed = action in _READS
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _fetch(cursor: sqlite3.Cursor, deadline: float) -> Result:
    rows: list[tuple[Any, ...]] = []
    size = 0
    for row in cursor:
        rows.append(row)
        size += sum(len(cell) for cell in row if isinstance(cell, str | bytes))
        if len(rows) > MAX_ROWS or size > MAX_RESULT_BYTES:
            raise QueryFailed(f"it returns more than {MAX_ROWS} rows or {MAX_RESULT_BYTES} bytes")
        if time.monotonic() > deadline:
            raise sqlite3.OperationalError("interrupted")
    return Result(tuple(column[0] for column in cursor.description or ()), rows)
