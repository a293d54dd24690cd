"""Charges of samples, which are stored before the samples are answered: who has an answer was charged for it.

Those that come while the database stores others are stored together, so a sample waits for two commits at most. If the
database cannot store them at once, samples are answered all the same, and it is tried until it can: only where this
server ends before that, too, are they lost.
"""

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial

from sqlmodel import Session

from skyrl.tinker.database.database import Database
from skyrl.tinker.database.ledger import charged_samples
from skyrl.tinker.database.ledger.charges import Charge
from skyrl.tinker.database.retrying_writer import RetryingWriter, Stopped
from skyrl.tinker.database.tables import ChargedSampleRow
from skyrl.tinker.errors import DatabaseFull
from skyrl.tinker.identity.callers import Caller

log = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""Seconds that a sample waits at most for its charge to be stored."""


class _Batch:
    """Charges that are stored together."""

    def __init__(self) -> None:
        self.charges: dict[str, Charge] = {}
        """By request id."""
        self.tried = asyncio.Event()
        """Set once they have been stored, or could not be at the first try."""


class SampleCharges:
    """Stores what samples used. All methods are called on the event loop."""

    def __init__(self, database: Database):
        self._database = database
        self._writer = RetryingWriter(database, DatabaseFull)
        self._next = _Batch()
        self._storing: asyncio.Task[None] | None = None
        self._since = time.monotonic()
        self._handed_out: set[str] = set()
        """Samples of which the database has not been told that they were answered."""

    async def store(self, request_id: str, charge: Charge) -> None:
        """Return once a sample's charge is stored, or cannot be for now."""
        batch = self._next
        batch.charges[request_id] = charge
        self._handed_out.discard(request_id)
        if self._storing is None:
            self._storing = asyncio.create_task(self._store())
        with suppress(TimeoutError):
            await asyncio.wait_for(batch.tried.wait(), PATIENCE_S)

    def handed_out(self, request_id: str) -> None:
        """A sample's answer goes to its client. The database is told with the next charges."""
        self._handed_out.add(request_id)

    async def refund(self, request_id: str, caller: Caller) -> None:
        """Take back the charge for a sample whose answer is gone, before its client is told so."""
        if request_id in self._handed_out:
            return
        if await self._database.read(lambda session: session.get(ChargedSampleRow, request_id)) is not None:
            await self._database.write(partial(charged_samples.refund, request_id=request_id, caller=caller))

    async def drain(self) -> None:
        """Wait until all that has come is stored, or cannot be."""
        self._writer.stop()
        if self._storing is not None:
            await self._storing

    async def _store(self) -> None:
        try:
            while (batch := self._next).charges:
                self._next = _Batch()
                await self._writer.attempt(partial(self._try, batch), "charges of samples are not stored")
        except Stopped as error:
            log.warning("%s; they are lost", error)
        finally:
            self._storing = None

    async def _try(self, batch: _Batch) -> None:
        # Clients of the server before this one have had time to come back.
        forgets, handed_out = time.monotonic() - self._since > charged_samples.KEPT_S, frozenset(self._handed_out)

        def store(session: Session) -> None:
            charged_samples.add(session, batch.charges)
            charged_samples.handed_out(session, handed_out)
            if forgets:
                charged_samples.forget(session)

        try:
            await self._database.write(store)
            self._handed_out -= handed_out
        finally:
            batch.tried.set()
