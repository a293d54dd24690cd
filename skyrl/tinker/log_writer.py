"""Puts training requests into the log, and finds out whether they are in it where the database does not say.

A database may store a transaction and its answer be lost, as when a PostgreSQL server is replaced. Then the request is
in the log and has to be done, or all that comes after it would wait. So a write without an answer is asked for again,
until there is one: a request that is found in the log was put there by an earlier try.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy.exc import IntegrityError, InterfaceError, OperationalError
from sqlmodel import Session

from skyrl.errors import UnknownName
from skyrl.tinker import request_log
from skyrl.tinker.futures import Failure
from skyrl.tinker.outcomes import FIRST_PAUSE_S, LONGEST_PAUSE_S
from skyrl.tinker.request_log import Entry, Logged
from skyrl.tinker.service import Service

log = logging.getLogger(__name__)


class LogWriter:
    """Appends to the log. All methods are called on the event loop."""

    def __init__(self, service: Service):
        self._service = service
        self._closing = asyncio.Event()

    async def append(self, entry: Entry, refusal: Failure | None, on_log: Callable[[Session], None]) -> Logged:
        """As `request_log.append`, once the database has answered. Raises its refusal if the server is to stop first.

        Any other error means that the request is not in the log.
        """
        job = _Append(entry, refusal, on_log)
        pause_s, conflicts = FIRST_PAUSE_S, 0
        while True:
            try:
                return await self._service.database.write(job)
            except (OperationalError, InterfaceError) as error:
                if self._closing.is_set():
                    raise
                log.error("request %s may not be logged (%s); trying again until it is", entry.request_id, error)
            except IntegrityError:
                # With an earlier try of it, which has taken effect after all? Then the next one finds it.
                conflicts += 1
                if conflicts == 2:
                    raise
            try:
                await asyncio.wait_for(self._closing.wait(), pause_s)
            except TimeoutError:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def stop(self) -> None:
        """Try nothing again any more."""
        self._closing.set()


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
