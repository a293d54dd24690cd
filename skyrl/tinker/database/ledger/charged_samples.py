"""Database jobs that charge each sample with an answer exactly once.

A sample is charged before it is answered, and its charge is stored until its answer is handed out. If the answer is
lost before that, because the API process was killed or evicted it, the client gets an error and the charge is refunded.
A resubmitted sample is charged like any other. If a request id is charged again, the new charge replaces the old one.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from sqlalchemy import bindparam, delete, text
from sqlmodel import Session, col

from skyrl.tinker.database.ledger import charges
from skyrl.tinker.database.ledger.charges import HOUR_S, Charge
from skyrl.tinker.database.tables import ChargedSampleRow, UsageRow
from skyrl.tinker.identity.callers import Caller

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


def add(session: Session, samples: Mapping[str, Charge]) -> None:
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


def refund(session: Session, request_id: str, caller: Caller) -> None:
    """Refund a sample's charge if the sample is the caller's and its answer was not handed out."""
    row = session.get(ChargedSampleRow, request_id)
    used = None if row is None else session.get(UsageRow, (row.session_id, row.model_id, row.hour))
    if row is not None and used is not None and caller.may_touch(used.tenant):
        _take_back(session, row)
        session.delete(row)


def handed_out(session: Session, request_ids: Collection[str]) -> None:
    """Record that samples were answered, so their charges are final."""
    if request_ids:
        session.connection().execute(_DELETE, [{"request_id": name} for name in request_ids])


def forget(session: Session) -> None:
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
