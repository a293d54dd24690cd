"""Retries of the database until it answers, or the server is to stop."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from sqlalchemy.exc import InterfaceError, InternalError, OperationalError

from skyrl.tinker.database.database import Database, Job
from skyrl.tinker.database.fence import Superseded
from skyrl.utils.backoff import pause_s

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
PASSING = (OperationalError, InterfaceError, InternalError)
"""Errors of a connection: the database was away, is busy, or went away in between."""


class Stopped(Exception):
    """The database has not answered, and the server is to stop. What was to be stored may or may not be."""


class RetryingWriter:
    """Reads from and writes to a database that may be away. All methods are called on the event loop.

    Args:
        database: Of the server.
        also: Errors to try again after, beside those of a connection. A connection may end after its write took effect.
    """

    def __init__(self, database: Database, *also: type[Exception]):
        self._database = database
        self._passing = (*PASSING, *also)
        self._closing = asyncio.Event()

    async def write(self, job: Job[T], what: str) -> T:
        """Result of `job`, which stores `what`. Raises `Stopped`."""
        return await self.attempt(partial(self._database.write, job), f"{what} may not be stored")

    async def read(self, job: Job[T], what: str) -> T:
        """Result of `job`, which reads `what`. Raises `Stopped`."""
        return await self.attempt(partial(self._database.read, job), f"{what} cannot be read")

    async def attempt(self, work: Callable[[], Awaitable[T]], problem: str) -> T:
        """Result of `work`, which may be done any number of times; `problem` is why it may be. Raises `Stopped`."""
        failures = 0
        while True:
            try:
                return await work()
            except Superseded as error:
                raise Stopped(str(error)) from error
            except self._passing as error:
                if self._closing.is_set():
                    raise Stopped(f"{problem} ({error})") from error
                log.error("%s (%s); trying again until it is", problem, error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S))
            failures += 1

    def stop(self) -> None:
        """Try nothing again any more."""
        self._closing.set()
