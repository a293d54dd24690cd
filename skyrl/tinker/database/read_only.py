"""Read-only access to a database, whether or not a server uses it.

Unlike `Database`, it takes no lock, creates no file, migrates nothing and changes no permissions.
"""

from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import sqlalchemy
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError
from sqlmodel import Session

from skyrl.errors import RequestError
from skyrl.tinker.config import without_password
from skyrl.tinker.database.database import KNOWN, POSTGRES_LIMITS, Job, revision_of, sqlite_file, with_driver

T = TypeVar("T")


class Readable(Protocol):
    """Runner of jobs that only read."""

    url: str

    def read_now(self, job: Job[T]) -> T:
        """Run `job` in this thread."""
        ...


class ReadOnlyDatabase:
    """A database for jobs that only read.

    Args:
        url: URL as for `Database`.

    Raises:
        RequestError: The database is missing, cannot be opened, or does not belong to this server.
    """

    def __init__(self, url: str):
        self.url = without_password(url)
        try:
            parsed = _address(url)
            limits: dict[str, Any] = {} if parsed.get_backend_name() == "sqlite" else {"connect_args": POSTGRES_LIMITS}
            self._engine = sqlalchemy.create_engine(parsed, **limits)
            with self._engine.connect() as connection:
                self.revision = revision_of(connection)
                """Revision of the database; None if the database was not created by this server."""
        except (ArgumentError, DatabaseError, ModuleNotFoundError) as error:
            why = error.orig if isinstance(error, DatabaseError) else error
            raise RequestError(f"database_url={self.url}: it cannot be opened ({why})") from error
        self.oldest, self.newest = KNOWN[0], KNOWN[-1]
        """Oldest and newest revision that this installation knows."""
        self.known = self.revision in KNOWN
        """True if this installation knows the database's revision."""

    def read_now(self, job: Job[T]) -> T:
        """Run `job` in this thread."""
        with Session(self._engine, expire_on_commit=False) as session:
            return job(session)

    def close(self) -> None:
        self._engine.dispose()


def _address(url: str) -> URL:
    """Return the URL of a database. For SQLite, it is a URI with which SQLite creates no files.

    A server that stops removes its `-wal` file, and SQLite would create it again. Without such a file, the database is
    therefore opened as immutable.
    """
    file = sqlite_file(url)
    if file is None:
        return with_driver(make_url(url))
    mode = "mode=ro" if file.with_name(f"{file.name}-wal").exists() else "immutable=1"
    return make_url(f"sqlite:///file:{quote(str(file))}?{mode}&uri=true")
