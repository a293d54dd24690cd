"""Usage of all tenants, for operators. All functions only read (jobs for `Database.read`)."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

import numpy as np
from sqlalchemy import func, select
from sqlmodel import Session, col

from skyrl.errors import RequestError
from skyrl.tinker.database.ledger.billing import gigabyte_hours
from skyrl.tinker.database.ledger.charges import HOUR_S
from skyrl.tinker.database.tables import AuditRow, CheckpointRow, UsageRow
from skyrl.tinker.identity.callers import LOCAL, DisplayNames
from skyrl.tinker.identity.ids import is_key_name
from skyrl.tinker.wire import management_schemas as rest

Period = Literal["total", "day", "hour"]
"""Length of time that a row covers: the whole window, or a day or an hour in UTC."""
STEPS = {"day": 24 * HOUR_S, "hour": HOUR_S}
MOST_ROWS = 50_000
"""Maximum number of rows in a response: about 20 MB."""
SUMS = ("requests", "trained_tokens", "forward_tokens", "prefill_tokens", "cached_tokens", "sampled_tokens", "samples")
"""Numbers of `UsageRow` that are added up, followed by its seconds."""
SECONDS = ("training_s", "sampling_s")
CREATED, STORED = len(SUMS) + len(SECONDS), len(SUMS) + len(SECONDS) + 1
"""Columns after those of `UsageRow`: checkpoints created, and gigabyte-hours of stored checkpoints."""

Group = tuple[str, str]
"""(tenant, base model). On a server without keys, the tenant is "" for all sessions."""
Sums = defaultdict[tuple[Group, int], np.ndarray]
"""Columns by group and position of the period."""


def usage_of_all(
    session: Session, names: DisplayNames, begin: int | None, end: int | None, per: Period, now: float
) -> rest.TenantUsageResponse:
    """Return the usage of every tenant with any, by base model and period.

    The window is cut to the time from the first hour in the ledger to the end of the current hour.

    Args:
        session: Transaction to read in.
        names: Display names of the tenants.
        begin: Start of an hour, in Unix seconds.
        end: Start of an hour, in Unix seconds.
        per: Length of the periods.
        now: Time until which storage is counted, in Unix seconds.

    Raises:
        RequestError: There are more than `MOST_ROWS` rows.
    """
    first, last = _first_hour(session, now), (int(now) // HOUR_S + 1) * HOUR_S
    begin, end = max(first, first if begin is None else begin), min(last, last if end is None else end)
    if end <= begin:
        return rest.TenantUsageResponse(data=[])
    edges = _edges(begin, end, per)
    sums: Sums = defaultdict(lambda: np.zeros(STORED + 1))
    _add_charges(session, sums, edges, per)
    _add_created(session, sums, edges, per)
    _add_stored(session, sums, edges, per, now)
    data = [_row(group, amounts, edges[place : place + 2], names) for (group, place), amounts in sums.items()]
    return rest.TenantUsageResponse(data=sorted(data, key=lambda row: (row.from_utc, row.base_model, row.tenant)))


def _check_number(rows: int, per: Period) -> None:
    if rows > MOST_ROWS:
        raise RequestError(
            f"per={per}: the window has more than {MOST_ROWS} rows of usage; ask for a shorter window or longer periods"
        )


def _first_hour(session: Session, now: float) -> int:
    """Start of the first hour with usage or checkpoints."""
    moments = (col(UsageRow.hour), col(AuditRow.created_at), col(CheckpointRow.created_at))
    first = (session.execute(select(func.min(moment))).scalar_one() for moment in moments)
    return int(min((found for found in first if found is not None), default=now)) // HOUR_S * HOUR_S


def _edges(begin: int, end: int, per: Period) -> np.ndarray:
    """Return the starts of the periods, and the end of the last one. The first and last period may be shorter."""
    if per == "total":
        return np.array([begin, end])
    step = STEPS[per]
    return np.unique([begin, *range(begin // step * step + step, end, step), end])


def _group(tenant: str, base_model: str) -> Group:
    """Return the group of a tenant. A session is a tenant if it was created while the server had no keys."""
    return tenant if is_key_name(tenant) else "", base_model


def _add_charges(session: Session, sums: Sums, edges: np.ndarray, per: Period) -> None:
    hour = col(UsageRow.hour)
    amounts = [func.sum(getattr(UsageRow, name)) for name in (*SUMS, *SECONDS)]
    groups = [col(UsageRow.tenant), col(UsageRow.base_model)]
    periods = [hour - hour % STEPS[per]] if per in STEPS else []
    query = select(*groups, func.min(hour), *amounts).where(hour >= int(edges[0]), hour < int(edges[-1]))
    for tenant, base_model, first, *found in session.execute(query.group_by(*groups, *periods)):
        sums[_group(tenant, base_model), _place(edges, first)][:CREATED] += np.array(found, dtype=float)
        _check_number(len(sums), per)


def _add_created(session: Session, sums: Sums, edges: np.ndarray, per: Period) -> None:
    moment = col(AuditRow.created_at)
    created = select(AuditRow).where(
        col(AuditRow.event) == "checkpoint_create", moment >= int(edges[0]), moment < int(edges[-1])
    )
    for event in session.execute(created).scalars():
        sums[_group(event.tenant, event.details["base_model"]), _place(edges, event.created_at)][CREATED] += 1
        _check_number(len(sums), per)


def _add_stored(session: Session, sums: Sums, edges: np.ndarray, per: Period, now: float) -> None:
    stored: defaultdict[Group, np.ndarray] = defaultdict(lambda: np.zeros(len(edges) - 1))
    for tenant, base_model, size, since, until in _stored(session, edges, now):
        stored[_group(tenant, base_model)] += gigabyte_hours(edges, size, since, min(until, now))
    for group, amounts in stored.items():
        for place in np.flatnonzero(amounts):
            sums[group, int(place)][STORED] = amounts[place]
            _check_number(len(sums), per)


def _stored(session: Session, edges: np.ndarray, now: float) -> Iterator[tuple[str, str, int, float, float]]:
    """Yield tenant, base model, bytes, start and end of each checkpoint that was stored in the window."""
    names = ("tenant", "base_model", "size_bytes", "created_at")
    there = select(*(getattr(CheckpointRow, name) for name in names))
    for tenant, base_model, size, since in session.execute(there.where(col(CheckpointRow.created_at) < int(edges[-1]))):
        yield tenant, base_model, size or 0, since, now
    gone = select(AuditRow).where(col(AuditRow.event) == "checkpoint_delete", col(AuditRow.created_at) >= int(edges[0]))
    for event in session.execute(gone).scalars():
        told = event.details
        yield event.tenant, told["base_model"], told["size_bytes"] or 0, told["stored_since"], event.created_at


def _place(edges: np.ndarray, moment: float) -> int:
    """Return the position of the period that contains a moment."""
    return int(np.searchsorted(edges, moment, side="right")) - 1


def _row(group: Group, amounts: np.ndarray, period: np.ndarray, names: DisplayNames) -> rest.TenantUsage:
    tenant, base_model = group
    counts = dict(zip((*SUMS, *SECONDS), amounts, strict=False))
    return rest.TenantUsage(
        from_utc=rest.moment(float(period[0])),
        to_utc=rest.moment(float(period[1])),
        tenant=(names(tenant) if names else tenant) or LOCAL,
        tenant_id=tenant or None,
        base_model=base_model,
        requests=int(counts["requests"]),
        trained_tokens=int(counts["trained_tokens"]),
        scored_tokens=int(counts["forward_tokens"]),
        prompt_tokens=int(counts["prefill_tokens"] + counts["cached_tokens"]),
        cached_prompt_tokens=int(counts["cached_tokens"]),
        sampled_tokens=int(counts["sampled_tokens"]),
        samples=int(counts["samples"]),
        training_device_seconds=round(float(counts["training_s"]), 3),
        sampling_device_seconds=round(float(counts["sampling_s"]), 3),
        checkpoints_created=int(amounts[CREATED]),
        checkpoint_gigabyte_hours=round(float(amounts[STORED]), 6),
    )
