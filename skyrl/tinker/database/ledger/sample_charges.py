"""Charges of samples, stored before the samples are answered, so every answered sample was charged.

Charges that arrive during a database write are stored together by the next write, so a sample waits for at most two
commits. If the first attempt to store them fails or takes more than a minute, samples are answered nevertheless, and
the write is retried. Charges are lost only if this server exits before a retry succeeds.
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

PATIENCE_S = 60.0
"""Maximum seconds that a sample waits for the first attempt to store its charge. SQLite gives up a lock after 10 s."""
RECORD_S = 1.0
"""Maximum seconds from the delivery of an answer until it is recorded, if the database responds."""


class _Batch:
    """Charges that are stored together."""

    def __init__(self) -> None:
        self.charges: dict[str, Charge] = {}
        """Charges by request id."""
        self.tried = asyncio.Event()
        """Set after the first attempt to store the charges."""


class SampleCharges:
    """Stores charges of samples. All methods are called on the event loop."""

    def __init__(self, database: Database):
        self._database = database
        self._writer = RetryingWriter(database, DatabaseFull)
        self._next = _Batch()
        self._storing: asyncio.Task[None] | None = None
        self._recording: asyncio.TimerHandle | None = None
        """Timer of the next record of deliveries. A write of charges before then records them, too."""
        self._stopping = False
        self._since = time.monotonic()
        self._handed_out: set[str] = set()
        """Answered samples that are not recorded in the database yet."""

    async def store(self, request_id: str, charge: Charge) -> None:
        """Store a sample's charge. Returns after the first attempt."""
        batch = self._next
        batch.charges[request_id] = charge
        self._handed_out.discard(request_id)
        self._start()
        with suppress(TimeoutError):
            await asyncio.wait_for(batch.tried.wait(), PATIENCE_S)

    def handed_out(self, request_id: str) -> None:
        """Record that a sample's answer is sent to its client.

        The database is updated with the next charges, or after `RECORD_S`.
        """
        self._handed_out.add(request_id)
        self._record_soon()

    async def refund(self, request_id: str, caller: Caller) -> None:
        """Refund the charge of a sample whose answer was lost. Call before the client gets the error."""
        if request_id in self._handed_out:
            return
        if await self._database.read(lambda session: session.get(ChargedSampleRow, request_id)) is not None:
            await self._database.write(partial(charged_samples.refund, request_id=request_id, caller=caller))

    async def drain(self) -> None:
        """Wait until all charges and deliveries are stored or given up."""
        self._writer.stop()
        self._stopping = True
        if self._storing is not None:
            await self._storing
        if self._recording is not None:
            self._recording.cancel()
        if self._handed_out:
            await self._store()

    def _start(self) -> None:
        """Start to store charges and deliveries, unless they are being stored."""
        if self._recording is not None:
            self._recording.cancel()
            self._recording = None
        if self._storing is None:
            self._storing = asyncio.create_task(self._store())

    def _record_soon(self) -> None:
        if self._handed_out and self._storing is None and self._recording is None and not self._stopping:
            self._recording = asyncio.get_running_loop().call_later(RECORD_S, self._start)

    async def _store(self) -> None:
        try:
            while True:
                batch, self._next = self._next, _Batch()
                await self._writer.attempt(partial(self._try, batch), "charges of samples are not stored")
                if not self._next.charges:
                    break
        except Stopped as error:
            log.warning("%s; they are lost", error)
        finally:
            self._storing = None
            self._record_soon()

    async def _try(self, batch: _Batch) -> None:
        # By then, clients of the previous server have had time to retrieve or lose their answers.
        forgets, handed_out = time.monotonic() - self._since > charged_samples.KEPT_S, frozenset(self._handed_out)

        def store(session: Session) -> None:
            if batch.charges:
                charged_samples.add(session, batch.charges)
            charged_samples.handed_out(session, handed_out)
            if forgets:
                charged_samples.forget(session)

        try:
            await self._database.write(store)
            self._handed_out -= handed_out
        finally:
            batch.tried.set()
