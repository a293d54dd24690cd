"""The database, opened only by the API process and never accessed on its event loop.

One thread writes. It runs all queued jobs in one transaction (group commit), so a burst of requests costs one fsync,
and a job that reads before it writes needs no lock. Reads run in a small pool of threads.
"""

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy
from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError, InterfaceError, InternalError, OperationalError
from sqlalchemy.pool import PoolProxiedConnection
from sqlmodel import Session, SQLModel

from skyrl.errors import RequestError
from skyrl.tinker.config import without_password
from skyrl.tinker.database import tables
from skyrl.tinker.database.fence import TRY_LOCK, WRITES, Fence, Superseded, writing
from skyrl.tinker.errors import DatabaseFull
from skyrl.utils.locks.lease import Lease, in_use
from skyrl.utils.slow_calls import calling

if TYPE_CHECKING:
    from alembic.config import Config as AlembicConfig

log = logging.getLogger(__name__)

assert tables.RequestRow.metadata is SQLModel.metadata

T = TypeVar("T")
Job = Callable[[Session], T]

MIGRATIONS = Path(__file__).parent / "migrations"
KNOWN = sorted(file.name[1:].partition("_")[0] for file in (MIGRATIONS / "versions").glob("r*.py"))
"""Revisions, oldest first, by file name: `rNNNN_what.py`. The last one matches `tables`."""
REVISIONS = sqlalchemy.Table(
    "alembic_version",
    sqlalchemy.MetaData(),
    sqlalchemy.Column("version_num", sqlalchemy.String(32), nullable=False),
    sqlalchemy.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""Alembic's table, with one row: the revision of the database."""
MAX_GROUP = 256
"""Maximum jobs per transaction."""
MAX_QUEUED = 10_000
"""Maximum queued jobs of the writer. Above this, `write` waits before it queues its job."""
READERS = 4
POSTGRES_LIMITS = {"connect_timeout": 10, "tcp_user_timeout": 20_000}
"""Timeouts of a connection: seconds to connect, milliseconds until unacknowledged data close it."""
CLAIM_S = 10.0
"""Seconds to wait for the advisory lock, because PostgreSQL may not have noticed yet that the previous server is dead.
"""
IN_MEMORY = (None, "", ":memory:")
"""SQLite's names for databases without a file."""
NAME_IT = "name the one that the server uses with --database-url"
VACUUM_PAGES = 500
"""Pages of an SQLite file that one transaction frees."""
INCREMENTAL = 2
"""SQLite's value for incremental auto-vacuum."""


class Unreachable(RequestError):
    """The database does not exist or does not respond."""


@dataclass
class _Queued:
    job: Job[Any]
    future: "Future[Any]"


class Database:
    """An open database at the newest revision.

    Args:
        url: SQLAlchemy URL, `sqlite:///FILE` or `postgresql://...` (needs the `postgres` extra).
        migrate: Migrate an older database to the newest revision. False: reject it.
        create: Create a missing database. False: raise an error.

    Raises:
        RequestError: The database at this URL cannot be used. The message says what to change.
    """

    def __init__(self, url: str, migrate: bool = True, create: bool = True):
        self.url = without_password(url)
        if not create:
            _refuse_missing_file(url)
        with ExitStack() as undo:
            self._lease = _lease(url)
            if self._lease is not None:
                undo.callback(self._lease.release)
            self._engine = _open(url)
            undo.callback(self._engine.dispose)
            claim = _claim(self._engine, url)
            undo.callback(claim.close)
            if not create:
                _refuse_foreign(self._engine, url)
            _migrate(self._engine, url) if migrate else _refuse_old(self._engine, url)
            self.fence = Fence(self._engine, claim, f"database_url={self.url}", writes=migrate)
            undo.pop_all()
        self._writing = writing(self._engine)
        self._room = asyncio.Semaphore(MAX_QUEUED)
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(READERS, "database-reader")
        self._writer = threading.Thread(target=self._write_loop, name="database-writer", daemon=True)
        self._writer.start()

    async def write(self, job: Job[T]) -> T:
        """Run `job` in the writer's next transaction; return after the commit.

        If the job raises an exception, its changes are rolled back. If the transaction fails, for example because the
        disk is full, the job may run again alone, so it must contain only database work.

        Raises:
            DatabaseFull: The database's disk is full.
            Superseded: Another server has taken over this database.
        """
        async with self._room:
            future: Future[Any] = Future()
            self._queue.put(_Queued(job, future))
            return await asyncio.wrap_future(future)

    async def read(self, job: Job[T]) -> T:
        """Run `job` in a reader thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self.read_now, job)

    def read_now(self, job: Job[T]) -> T:
        """Run `job` in this thread."""
        with calling("database", f"read {self.url}"), Session(self._engine, expire_on_commit=False) as session:
            return job(session)

    async def give_back(self) -> None:
        """Return unused space of an SQLite file to the file system, in small transactions between other jobs."""
        while self._engine.dialect.name == "sqlite" and await self.write(_vacuum_some):
            pass

    def dry_run(self, job: Job[T]) -> T:
        """Run `job` in this thread and roll back its changes."""
        with Session(self._engine, expire_on_commit=False) as session:
            result = job(session)
            session.rollback()
        return result

    def compact(self) -> int:
        """Return all unused space of an SQLite file to the file system. Returns the number of bytes.

        Use only while nothing else uses the database. The call takes as long as a copy of the file, and as much disk
        space.
        """
        if self._engine.dialect.name != "sqlite":
            return 0
        with closing(self._engine.raw_connection()) as connection:
            before = _sqlite_bytes(connection)
            for statement in (f"PRAGMA auto_vacuum={INCREMENTAL}", "VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
                _run_to_end(connection, statement)
            return before - _sqlite_bytes(connection)

    def close(self) -> None:
        """Finish queued writes and close all connections."""
        self._queue.put(None)
        self._writer.join()
        self._readers.shutdown()
        self.fence.close()
        self._engine.dispose()
        if self._lease is not None:
            self._lease.release()

    def _write_loop(self) -> None:
        while (first := self._queue.get()) is not None:
            group = [first]
            last = False
            with suppress(queue.Empty):
                while len(group) < MAX_GROUP and not last:
                    item = self._queue.get_nowait()
                    if item is None:
                        last = True
                    else:
                        group.append(item)
            # Drop jobs whose caller has stopped waiting. The others cannot be cancelled from here on.
            self._commit([queued for queued in group if queued.future.set_running_or_notify_cancel()])
            if last:
                return

    def _commit(self, group: list[_Queued]) -> None:
        """Run a group of jobs in one transaction. A failed job is rolled back alone."""
        try:
            with calling("database", f"write {self.url}"), Session(self._writing, expire_on_commit=False) as session:
                self.fence.check(session)
                outcomes = _attempt(session, [queued.job for queued in group])
                session.commit()
        except Exception as error:
            if len(group) == 1 or _is_of_all(error):
                for queued in group:
                    queued.future.set_exception(_named(error, self.url))
            else:  # for example, the disk is almost full: small jobs may still fit
                for queued in group:
                    self._commit([queued])
            return
        for queued, outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, _Failed):
                queued.future.set_exception(outcome.error)
            else:
                queued.future.set_result(outcome)


@dataclass
class _Failed:
    error: Exception


def _attempt(session: Session, jobs: Sequence[Job[Any]]) -> list[Any]:
    """Run the jobs.

    Returns their results, or `_Failed` for jobs that were rolled back. Raises errors that end the transaction.
    """
    if len(jobs) == 1:
        return [jobs[0](session)]
    outcomes: list[Any] = []
    for job in jobs:
        savepoint = session.begin_nested()
        try:
            outcome = job(session)
            savepoint.commit()
        except Exception as error:
            if isinstance(error, (OperationalError, InterfaceError, InternalError)) and not _is_of_one(error):
                raise
            savepoint.rollback()
            outcome = _Failed(error)
        session.expunge_all()  # otherwise a later job's rollback could expire the rows that this job returns
        outcomes.append(outcome)
    return outcomes


def migration_config(connection: Connection) -> "AlembicConfig":
    """Alembic's configuration for an open connection."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    return config


def _refusal(url: str, why: str) -> RequestError:
    return RequestError(f"database_url={without_password(url)}: {why}")


def _migrate(engine: Engine, url: str) -> None:
    """Migrate a database to the newest revision.

    A new database is created directly from the current tables, as Alembic's cookbook suggests. Alembic is imported only
    for an older database, because the import takes as long as the rest of a start.
    """
    with engine.begin() as connection:
        present = sqlalchemy.inspect(connection).get_table_names()
        if not present:
            SQLModel.metadata.create_all(connection)
            REVISIONS.create(connection)
            connection.execute(REVISIONS.insert().values(version_num=KNOWN[-1]))
        elif (revision := revision_of(connection)) != KNOWN[-1]:
            if (why := unknown_revision(revision)) is not None:
                raise _refusal(url, f"{why}, or use another database")
            from alembic import command

            command.upgrade(migration_config(connection), "head")


def _refuse_missing_file(url: str) -> None:
    file = sqlite_file(url)
    if file is not None and not (file.is_file() and file.stat().st_size > 0):
        raise _refusal(url, f"there is no database; {NAME_IT}")


def _refuse_foreign(engine: Engine, url: str) -> None:
    with engine.connect() as connection:
        if revision_of(connection) is None:
            raise _refusal(url, f"it is no database of this server; {NAME_IT}")


def unknown_revision(revision: str | None) -> str | None:
    """Reason why this version cannot use a database of a revision, with the remedy. None if it can."""
    if revision is None or revision in KNOWN:
        return None
    if revision < KNOWN[0]:
        return (
            f"it has revision {revision}, and this version upgrades databases from revision {KNOWN[0]} on; start a "
            f"version of revision {KNOWN[0]} on it first (docs/backups.md)"
        )
    return f"it was written by another version of this server (unknown revision {revision}); start that one"


def revision_of(connection: Connection) -> str | None:
    """Return the database's revision, or None if the database has no table of revisions."""
    if not sqlalchemy.inspect(connection).has_table(REVISIONS.name):
        return None
    return connection.execute(sqlalchemy.select(REVISIONS.c.version_num)).scalar()


def _refuse_old(engine: Engine, url: str) -> None:
    with engine.connect() as connection:
        if (revision := revision_of(connection)) != KNOWN[-1]:
            upgrade = "it was not written by this version of the server; start the server once to upgrade it"
            raise _refusal(url, unknown_revision(revision) or upgrade)


def _claim(engine: Engine, url: str) -> Connection:
    """Open a connection that holds the database's advisory lock on PostgreSQL. SQLite uses `FILE.lock` instead."""
    connection = engine.connect()
    if engine.dialect.name == "postgresql":
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        deadline = time.monotonic() + CLAIM_S
        while not connection.exec_driver_sql(TRY_LOCK).scalar():
            if time.monotonic() > deadline:
                connection.close()
                raise in_use(f"database_url={without_password(url)}", "--database-url")
            time.sleep(0.1)
    return connection


def _is_of_one(error: DBAPIError) -> bool:
    """Return True for PostgreSQL program-limit errors (SQLSTATE class 54), which leave the connection usable."""
    return (getattr(error.orig, "sqlstate", None) or "").startswith("54")


def _is_of_all(error: Exception) -> bool:
    """Return True if an error concerns all jobs of a transaction, so that they must not be retried one by one.

    If the connection was lost, the transaction may have been committed, and a retry could run jobs twice. If the
    database is locked, each retry would wait as long again. If another server has taken over, each retry would fail.
    """
    if not isinstance(error, DatabaseError):
        return isinstance(error, Superseded)
    code = getattr(error.orig, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    said_by_database = code != sqlite3.SQLITE_OK or getattr(error.orig, "sqlstate", None) is not None
    return error.connection_invalidated or not said_by_database or code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _named(error: Exception, url: str) -> Exception:
    """Return `DatabaseFull` for a disk error of the database. Other errors are returned unchanged."""
    cause = error.orig if isinstance(error, DatabaseError) else None
    sqlite_code = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    if sqlite_code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR) or getattr(cause, "sqlstate", None) == "53100":
        full = DatabaseFull(f"database_url={url}: {cause}; free space on its disk")
        full.__cause__ = error
        return full
    return error


def _vacuum_some(session: Session) -> bool:
    """Free some pages of the file. Returns True if there are more."""
    connection = session.connection().connection
    _run_to_end(connection, f"PRAGMA incremental_vacuum({VACUUM_PAGES})")
    return _pragma(connection, "auto_vacuum") == INCREMENTAL and _pragma(connection, "freelist_count") > 0


def _sqlite_bytes(connection: PoolProxiedConnection) -> int:
    return _pragma(connection, "page_count") * _pragma(connection, "page_size")


def _pragma(connection: PoolProxiedConnection, name: str) -> int:
    [(value,)] = _run_to_end(connection, f"PRAGMA {name}")
    return int(value)


def _run_to_end(connection: PoolProxiedConnection, statement: str) -> list[Any]:
    """Run an SQLite statement to its end in the current transaction, by fetching all of its rows."""
    driver = connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver.execute(statement).fetchall()


def _open(url: str) -> Engine:
    try:
        parsed = with_driver(make_url(url))
        if parsed.get_backend_name() not in ("sqlite", "postgresql"):
            raise _refusal(url, "use sqlite:///FILE or postgresql://USER@HOST/NAME")
        sqlite = parsed.get_backend_name() == "sqlite"
        if sqlite and parsed.database in IN_MEMORY:
            raise _refusal(url, "a database in memory is not served; name a file, sqlite:///FILE")
        if sqlite:
            _keep_private(Path(str(parsed.database)))
        # `pool_pre_ping` replaces a connection that has died while idle, before a job uses it.
        limits: dict[str, Any] = {} if sqlite else {"connect_args": POSTGRES_LIMITS}
        engine = sqlalchemy.create_engine(parsed, pool_size=READERS + 2, pool_pre_ping=not sqlite, **limits)
    except ModuleNotFoundError as error:
        raise _refusal(
            url, f"this needs the package {error.name}; install it with: pip install 'skyrl[postgres]'"
        ) from error
    except ArgumentError as error:
        raise _refusal(url, f"{error}; use sqlite:///FILE or postgresql://...") from error
    except OSError as error:
        raise _refusal(url, f"{error}; use a folder that can be written") from error
    if sqlite:
        event.listen(engine, "connect", _sqlite_connect)
        event.listen(engine, "begin", _sqlite_begin)
    try:
        engine.connect().close()
    except DatabaseError as error:
        raise Unreachable(
            str(_refusal(url, f"it cannot be opened ({error.orig}); check the path or server"))
        ) from error
    return engine


def with_driver(url: URL) -> URL:
    """Return the URL, with the driver psycopg if it is a `postgresql` URL without a driver."""
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def _keep_private(file: Path) -> None:
    """Create a database file if it is missing. Restrict it and the files beside it to their owner, because they contain
    secrets."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    for suffix in ("", "-wal", "-shm", ".lock"):
        with suppress(OSError):  # it does not exist, or another user owns it
            file.with_name(file.name + suffix).chmod(0o600)


def _sqlite_connect(connection: Any, _: Any) -> None:
    """Use WAL with synchronous=FULL: commits survive a crash of any process and of the machine."""
    connection.isolation_level = None  # the driver would open transactions by rules of its own; `_sqlite_begin` does
    if connection.execute("PRAGMA page_count").fetchone() == (0,):  # later it would be in vain, and a write
        connection.execute(f"PRAGMA auto_vacuum={INCREMENTAL}")
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000", "journal_size_limit=67108864"):
        connection.execute(f"PRAGMA {pragma}")


def _sqlite_begin(connection: Connection) -> None:
    """Take the write lock at the start of a writing transaction.

    If a transaction read first and locked later, SQLite would fail at once instead of waiting for the lock.
    """
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get(WRITES) else "BEGIN")


def sqlite_file(url: str) -> Path | None:
    """Return the file of an SQLite database, with links resolved. None: the URL has no such file."""
    try:
        parsed = make_url(url)
    except ArgumentError:  # refused when it is opened
        return None
    if parsed.get_backend_name() != "sqlite" or parsed.database in IN_MEMORY:
        return None
    return Path(str(parsed.database)).resolve()


def _lease(url: str) -> Lease | None:
    """Lock `FILE.lock`, so that a second server on the same SQLite file is rejected."""
    file = sqlite_file(url)
    if file is None:
        return None
    try:
        return Lease(file.with_name(f"{file.name}.lock"), f"database_url={without_password(url)}", "--database-url")
    except OSError as error:
        raise _refusal(url, f"{error}; use a folder that can be written") from error
