"""Retries of database jobs until the database responds or the server stops."""

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
"""Connection errors: the database was unavailable or busy, or the connection was lost."""


class Stopped(Exception):
    """The server stopped before the database responded. The data may or may not be stored."""


class RetryingWriter:
    """Reads from and writes to a database that may be unavailable. All methods are called on the event loop.

    Args:
        database: The server's database.
        also: Errors after which jobs are retried, in addition to connection errors. After a connection error, a write
            may have taken effect.
    """

    def __init__(self, database: Database, *also: type[Exception]):
        self._database = database
        self._passing = (*PASSING, *also)
        self._closing = asyncio.Event()

    async def write(self, job: Job[T], what: str) -> T:
        """Run `job`, which stores `what`. Raises `Stopped`."""
        return await self.attempt(partial(self._database.write, job), f"{what} may not be stored")

    async def read(self, job: Job[T], what: str) -> T:
        """Run `job`, which reads `what`. Raises `Stopped`."""
        return await self.attempt(partial(self._database.read, job), f"{what} cannot be read")

    async def attempt(self, work: Callable[[], Awaitable[T]], problem: str) -> T:
        """Run `work`, which must be repeatable. `problem` describes failures in the log. Raises `Stopped`."""
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
        """Stop all retries."""
        self._closing.set()
