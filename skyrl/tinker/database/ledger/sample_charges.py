"""Charges of samples: each sample with an answer is charged exactly once.

A sample is charged before it is answered, and its charge is stored until its answer is handed out. If the answer is
lost before that, because the API process was killed or evicted it, the client gets an error and the charge is refunded.
A resubmitted sample is charged like any other. If a request id is charged again, the new charge replaces the old one.

Charges that arrive during a database write are stored together by the next write, so a sample waits for at most two
commits. If the first attempt to store them fails or takes more than a minute, samples are answered nevertheless, and
the write is retried. Charges are lost only if this server exits before a retry succeeds.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from sqlalchemy import bindparam, delete, text
from sqlmodel import Session, col, select

from skyrl.tinker.database.database import Database
from skyrl.tinker.database.ledger import charges
from skyrl.tinker.database.ledger.charges import HOUR_S, Charge
from skyrl.tinker.database.retrying_writer import RetryingWriter, Stopped
from skyrl.tinker.database.tables import ChargedSampleRow, UsageRow
from skyrl.tinker.errors import DatabaseFull
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import is_own_session

KEPT_S = HOUR_S
"""Minimum seconds for which the charge of an unretrieved answer is stored. It may be stored for an hour longer."""
AT_A_TIME = 500
"""Maximum rows in a statement."""

AMOUNTS = ("prefill_tokens", "cached_tokens", "sampled_tokens", "samples", "sampling_s")
_COLUMNS = ("request_id", "session_id", "model_id", "hour", *AMOUNTS)
_STORE = text(
    f"INSERT INTO charged_samples ({', '.join(_COLUMNS)}) VALUES ({', '.join(f':{name}' for name in _COLUMNS)}) "
    f"ON CONFLICT (request_id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in _COLUMNS[1:])}"
)

_DELETE = text("DELETE FROM charged_samples WHERE request_id = :request_id")
_KNOWN = text("SELECT request_id FROM charged_samples WHERE request_id IN :request_ids").bindparams(
    bindparam("request_ids", expanding=True)
)


def charge_samples(session: Session, samples: Mapping[str, Charge]) -> None:
    """Charge samples in the current hour. `samples` has the charges by request id; an earlier charge is replaced."""
    hour = charges.this_hour()
    for row in _rows(session, list(samples)):
        _take_back(session, row)
    total: dict[tuple[str, str], Charge] = {}
    for charge in samples.values():
        place = charge.session_id, charge.model_id
        total[place] = total[place] + charge if place in total else charge
    charges.add(session, list(total.values()))
    rows = [{"request_id": name, "hour": hour, **vars(charge)} for name, charge in samples.items()]
    session.connection().execute(_STORE, [{name: row[name] for name in _COLUMNS} for row in rows])


def take_back(session: Session, request_id: str, caller: Caller) -> None:
    """Refund a sample's charge if the sample is the caller's and its answer was not handed out."""
    row = session.get(ChargedSampleRow, request_id)
    used = None if row is None else session.get(UsageRow, (row.session_id, row.model_id, row.hour))
    if row is not None and used is not None and caller.may_touch(used.tenant):
        _take_back(session, row)
        session.delete(row)


def settle(session: Session, request_ids: Collection[str]) -> None:
    """Record that samples were answered, so their charges are final."""
    if request_ids:
        session.connection().execute(_DELETE, [{"request_id": name} for name in request_ids])


def unanswered(session: Session) -> list[str]:
    """Return the samples of OpenAI's routes that an earlier server charged and did not answer: nobody can get them."""
    rows = session.exec(select(ChargedSampleRow.request_id, ChargedSampleRow.session_id)).all()
    return [request_id for request_id, session_id in rows if is_own_session(session_id)]


def refund(session: Session, request_ids: Sequence[str]) -> None:
    """Refund the charges of samples."""
    for row in _rows(session, request_ids):
        if session.get(UsageRow, (row.session_id, row.model_id, row.hour)) is not None:
            _take_back(session, row)
        session.delete(row)


def settle_old(session: Session) -> None:
    """Make a sample's charge final if the sample's answer was not retrieved within `KEPT_S`."""
    session.execute(delete(ChargedSampleRow).where(col(ChargedSampleRow.hour) < charges.this_hour() - KEPT_S))


def _rows(session: Session, request_ids: Sequence[str]) -> Iterator[ChargedSampleRow]:
    for first in range(0, len(request_ids), AT_A_TIME):
        some = {"request_ids": request_ids[first : first + AT_A_TIME]}
        for name in session.connection().execute(_KNOWN, some).scalars().all():
            row = session.get(ChargedSampleRow, name, populate_existing=True)
            assert row is not None, name
            yield row


def _take_back(session: Session, row: ChargedSampleRow) -> None:
    used = session.get(UsageRow, (row.session_id, row.model_id, row.hour), populate_existing=True)
    assert used is not None, row.request_id
    used.requests -= 1
    for name in AMOUNTS:
        setattr(used, name, getattr(used, name) - getattr(row, name))
    session.flush()


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
            await self._database.write(partial(take_back, request_id=request_id, caller=caller))

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
        forgets, handed_out = time.monotonic() - self._since > KEPT_S, frozenset(self._handed_out)

        def store(session: Session) -> None:
            if batch.charges:
                charge_samples(session, batch.charges)
            settle(session, handed_out)
            if forgets:
                settle_old(session)

        try:
            await self._database.write(store)
            self._handed_out -= handed_out
        finally:
            batch.tried.set()
