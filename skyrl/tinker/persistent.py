"""Writes that are asked for again until the database answers, or the server is to stop."""

import asyncio
import logging
from typing import TypeVar

from sqlalchemy.exc import InterfaceError, OperationalError

from skyrl.tinker.db import Database, Job

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class PersistentWriter:
    """Writes to a database that may be away. All methods are called on the event loop.

    Args:
        database: Of the server.
        also: Errors to try again after, beside those of a connection. A connection may end after its write took effect.
    """

    def __init__(self, database: Database, *also: type[Exception]):
        self._database = database
        self._passing = (OperationalError, InterfaceError, *also)
        self._closing = asyncio.Event()

    async def write(self, job: Job[T], what: str) -> T:
        """What `job`, which stores `what`, returns. Raises the last error if the server is to stop first."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await self._database.write(job)
            except self._passing as error:
                if self._closing.is_set():
                    raise
                log.error("%s may not be stored (%s); trying again until it is", what, error)
            try:
                await asyncio.wait_for(self._closing.wait(), pause_s)
            except TimeoutError:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def stop(self) -> None:
        """Try nothing again any more."""
        self._closing.set()
