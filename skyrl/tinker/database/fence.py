"""Fencing: only the newest server writes to a database, even if it has lost its lock.

Each start of a server increments a number in the settings, the epoch. Each writing transaction checks that the epoch is
unchanged, and fails otherwise. Writes of an older server are therefore rejected after a newer one has started, and the
older server exits. On PostgreSQL, the lock against a second server belongs to a connection, which may be lost while it
is unused. The lock is therefore checked periodically, and acquired again if it was lost.
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
"""Number of the PostgreSQL advisory lock for the server of a database."""
RAISE_S = 10
"""Seconds that a start waits for the row of the epoch."""
WRITES = "writes"
"""Execution option of connections for writing transactions."""
WATCH_S = 5.0
"""Seconds between two checks of the lock."""

_SETTINGS = SQLModel.metadata.tables[str(SettingRow.__tablename__)]
_READ = select(_SETTINGS.c.value).where(_SETTINGS.c.name == EPOCH)
# On PostgreSQL, the next server waits for transactions that have read the epoch. SQLite rejects them if it has changed.
_HOLD = _READ.with_for_update(read=True)
_HELD = (
    "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database WHERE datname = current_database() "
    f"AND locktype = 'advisory' AND granted AND pid = pg_backend_pid() AND classid = 0 AND objid = {SERVER_LOCK}"
)
TRY_LOCK = f"SELECT pg_try_advisory_lock({SERVER_LOCK})"


class Superseded(Exception):
    """Another server has taken over this database. Nothing was stored."""


def writing(engine: Engine) -> Engine:
    """Return the engine with the option for writing transactions."""
    return engine.execution_options(**{WRITES: True})


def raise_epoch(engine: Engine) -> None:
    """Start a new epoch, later than all earlier ones."""
    with Session(writing(engine)) as session:
        if engine.dialect.name == "postgresql":  # a server that hangs may hold the row for ever
            session.execute(text(f"SET LOCAL lock_timeout = '{RAISE_S}s'"))
        row = session.get(SettingRow, EPOCH, with_for_update=True) or SettingRow(name=EPOCH, value="0")
        row.value = str(int(row.value) + 1)
        session.add(row)
        session.commit()


class Fence:
    """Ensures that only one server writes to a database.

    Args:
        engine: The database's engine.
        claim: Connection that holds the lock on PostgreSQL; on SQLite, a connection without a lock.
        shown: Option that names the database, for messages.
        writes: True if this server writes, so it starts a new epoch. A reader starts none and excludes no other server.
    """

    def __init__(self, engine: Engine, claim: Connection, shown: str, writes: bool):
        self.on_superseded: Callable[[str], object] = lambda message: log.error("%s", message)
        """Called, from any thread, when another server has taken over this database."""
        self._engine = engine
        self._claim = claim
        self._shown = shown
        if writes:
            raise_epoch(engine)
        with engine.connect() as connection:
            self._epoch = connection.execute(_READ).scalar_one_or_none()
        self._hold = str(_HOLD.compile(engine, compile_kwargs={"literal_binds": True}))
        """Raw SQL, because it runs in each commit and takes a tenth of the time of a statement object."""
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="database-watcher", daemon=True)
        if engine.dialect.name == "postgresql":
            self._watcher.start()

    def check(self, session: Session) -> None:
        """Check the epoch at the start of each writing transaction. Raises `Superseded`."""
        if session.connection().exec_driver_sql(self._hold).scalar_one_or_none() != self._epoch:
            raise self._superseded()

    def close(self) -> None:
        """Release the lock."""
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
