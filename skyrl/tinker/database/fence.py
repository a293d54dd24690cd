"""One server writes to a database, whatever becomes of its lock.

Each start of a server raises a number in the settings, the epoch, and each of its transactions finds that number
unchanged or fails. So what an earlier server still wants to write after a later one has started is refused, and it
ends. On PostgreSQL the lock that keeps a second server from starting belongs to a connection, which may be lost while
nobody uses it: it is looked at every so often and taken again.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from sqlalchemy import Connection, Engine, select, text
from sqlalchemy.exc import DBAPIError
from sqlmodel import Session, SQLModel

from skyrl.tinker.database.tables import SettingRow

log = logging.getLogger(__name__)

EPOCH = "epoch"
SERVER_LOCK = 0x736B7972
"""PostgreSQL's number for the lock of the one server of a database."""
RAISE_S = 10
"""Seconds that a start waits for the row of the epoch."""
WRITES = "writes"
"""Execution option of connections whose transactions write."""
WATCH_S = 5.0
"""Seconds between two looks at the lock."""

_SETTINGS = SQLModel.metadata.tables[str(SettingRow.__tablename__)]
_READ = select(_SETTINGS.c.value).where(_SETTINGS.c.name == EPOCH)
# On PostgreSQL the next server waits for transactions that have read it; SQLite refuses theirs if it has changed since.
_HOLD = _READ.with_for_update(read=True)
_HELD = (
    "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database WHERE datname = current_database() "
    f"AND locktype = 'advisory' AND granted AND pid = pg_backend_pid() AND classid = 0 AND objid = {SERVER_LOCK}"
)
TRY_LOCK = f"SELECT pg_try_advisory_lock({SERVER_LOCK})"


class Superseded(Exception):
    """Another server has been started on this database. Nothing has been stored."""


def writing(engine: Engine) -> Engine:
    """The same engine, for transactions that write."""
    return engine.execution_options(**{WRITES: True})


def raise_epoch(engine: Engine) -> None:
    """Begin an epoch, later than any before it."""
    with Session(writing(engine)) as session:
        if engine.dialect.name == "postgresql":  # a server that hangs may hold the row for ever
            session.execute(text(f"SET LOCAL lock_timeout = '{RAISE_S}s'"))
        row = session.get(SettingRow, EPOCH, with_for_update=True) or SettingRow(name=EPOCH, value="0")
        row.value = str(int(row.value) + 1)
        session.add(row)
        session.commit()


class Fence:
    """Keeps servers apart that use one database.

    Args:
        engine: Of the database.
        claim: The connection that has the lock, where it has one.
        shown: The option that names the database, for messages.
        writes: Whether this one writes. To look at a database does not keep anybody from it.
    """

    def __init__(self, engine: Engine, claim: Connection, shown: str, writes: bool):
        self.on_superseded: Callable[[str], object] = lambda message: log.error("%s", message)
        """Told, in some thread, when another server has been started on this database."""
        self._engine = engine
        self._claim = claim
        self._shown = shown
        if writes:
            raise_epoch(engine)
        with engine.connect() as connection:
            self._epoch = connection.execute(_READ).scalar_one_or_none()
        self._hold = str(_HOLD.compile(engine, compile_kwargs={"literal_binds": True}))
        """SQL, which the driver runs in a tenth of the time that a statement takes: it is part of each commit."""
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="database-watcher", daemon=True)
        if engine.dialect.name == "postgresql":
            self._watcher.start()

    def check(self, session: Session) -> None:
        """At the beginning of each transaction that writes. Raises `Superseded`."""
        if session.connection().exec_driver_sql(self._hold).scalar_one_or_none() != self._epoch:
            raise self._superseded()

    def close(self) -> None:
        """Let the lock go."""
        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join()
        with suppress(DBAPIError):  # it may have been lost already
            self._claim.close()

    def _superseded(self) -> Superseded:
        message = (
            f"{self._shown}: another server has been started on this database, so this one ends; it has stored nothing "
            "since. Give each server a database of its own, and connect to PostgreSQL directly or through a pool in "
            "session mode"
        )
        self.on_superseded(message)
        return Superseded(message)

    def _watch(self) -> None:
        while not self._closing.wait(WATCH_S):
            try:
                self._look()
            except Superseded:
                return
            except DBAPIError as error:
                log.warning("the lock of the database cannot be looked at (%s); trying again", error)
                with suppress(DBAPIError):
                    self._claim.invalidate()

    def _look(self) -> None:
        if self._claim.invalidated or self._claim.closed:
            self._claim.close()
            self._claim = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        held = bool(self._claim.exec_driver_sql(_HELD).scalar())
        if not held and (held := bool(self._claim.exec_driver_sql(TRY_LOCK).scalar())):
            log.warning("the lock of the database was lost and has been taken again")
        elif not held:
            log.warning("the lock of the database was lost, and another connection has it; trying again")
        if self._claim.execute(_READ).scalar_one_or_none() != self._epoch:
            raise self._superseded()
