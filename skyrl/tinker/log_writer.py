"""Puts training requests into the log, and finds out whether they are in it where the database does not say.

A database may store a transaction and its answer be lost, as when a PostgreSQL server is replaced. Then the request is
in the log and has to be done, or all that comes after it would wait. So a write without an answer is asked for again,
until there is one: a request that is found in the log was put there by an earlier try.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy.exc import IntegrityError
from sqlmodel import Session

from skyrl.errors import UnknownName
from skyrl.tinker import request_log
from skyrl.tinker.futures import Failure
from skyrl.tinker.persistent import PersistentWriter
from skyrl.tinker.request_log import Entry, Logged
from skyrl.tinker.service import Service


class LogWriter:
    """Appends to the log. All methods are called on the event loop."""

    def __init__(self, service: Service):
        self._writer = PersistentWriter(service.database)

    async def append(self, entry: Entry, refusal: Failure | None, on_log: Callable[[Session], None]) -> Logged:
        """As `request_log.append`, once the database has answered. Raises its refusal if the server is to stop first.

        Any other error means that the request is not in the log.
        """
        job, what = _Append(entry, refusal, on_log), f"request {entry.request_id}"
        try:
            return await self._writer.write(job, what)
        except IntegrityError:  # with an earlier try of it, which has taken effect after all? Then this one finds it
            return await self._writer.write(job, what)

    def stop(self) -> None:
        """Try nothing again any more."""
        self._writer.stop()


@dataclass
class _Append:
    """A job of the database: to log a request, unless an earlier try of it has."""

    entry: Entry
    refusal: Failure | None
    on_log: Callable[[Session], None]
    tried: bool = False
    """By us, or by the writer, which does alone again what it could not do in a group."""

    def __call__(self, session: Session) -> Logged:
        if self.tried:
            with suppress(UnknownName):
                _, outcome = request_log.outcome_of(session, self.entry.request_id)
                return Logged(self.entry.request_id, outcome if isinstance(outcome, Failure) else None)
        self.tried = True
        return request_log.append(session, self.entry, self.refusal, self.on_log)
