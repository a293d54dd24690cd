"""Answers of the routes that read the ledger. All functions only read (jobs for `Database.read`).

The server has no prices, only quantities. A gigabyte is 10^9 bytes.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Literal, NamedTuple

import numpy as np
import sqlalchemy
from sqlalchemy import ColumnElement, case, func, true
from sqlmodel import Session, col, select

from skyrl.errors import RequestError
from skyrl.tinker.database.ledger.charges import HOUR_S
from skyrl.tinker.database.tables import AuditRow, CheckpointRow, ModelRow, SessionRow, UsageRow
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.wire import management_schemas as rest

GIGABYTE = 10**9
LONGEST = timedelta(days=14)
MOST_EVENTS = 50_000
"""Maximum number of events in a response for several hours: about 12 MB. A window of an hour is always answered."""
KINDS = (
    UsageRow.trained_tokens,
    UsageRow.forward_tokens,
    UsageRow.prefill_tokens,
    UsageRow.cached_tokens,
    UsageRow.samples,
)
"""Columns of `UsageRow`. Each column that is not 0 has an event."""
TRAIN_FLOPS, FORWARD_FLOPS = 6, 2
"""Floating-point operations per token and active parameter, for passes with gradients and for all other computation
(Kaplan et al. 2020, arXiv 2001.08361, section 2.1). Attention and adapters are not counted. Gradients of the base
model's weights are counted, although the training of an adapter does not need them."""
AuditType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class Window(NamedTuple):
    """A window from the start of one hour to the start of another, in Unix seconds."""

    begin: int
    end: int

    @classmethod
    def of(cls, starting_on: datetime, ending_before: datetime) -> "Window":
        """Create a window. Raises `RequestError` for an unsupported one."""
        window = cls(hour_of("starting_on", starting_on), hour_of("ending_before", ending_before))
        if not timedelta(0) < ending_before - starting_on <= LONGEST:
            raise RequestError(
                f"ending_before={ending_before.isoformat()} has to be after starting_on={starting_on.isoformat()}, and "
                f"by {LONGEST.days} days at most; ask for several windows"
            )
        return window


def hour_of(name: str, value: datetime) -> int:
    """Return a parameter in Unix seconds. Raises `RequestError` unless it is the start of an hour."""
    if value.timestamp() % HOUR_S:
        raise RequestError(f"{name}={value.isoformat()} is not the begin of a UTC hour; use one")
    return int(value.timestamp())


def usage(session: Session, caller: Caller, window: Window, now: float) -> rest.UsageResponse:
    """Return the caller's usage in a window, as hourly events.

    Raises `RequestError` for a window of several hours with more than `MOST_EVENTS` events.
    """
    seen = [col(UsageRow.hour) >= window.begin, col(UsageRow.hour) < window.end, _owned(UsageRow.tenant, caller)]
    made, stored = _made(session, caller, window), _stored(session, caller, window, now)
    of_storage = sum(int(np.count_nonzero(amounts)) for amounts in stored.values())
    of_tokens = sum(session.connection().execute(sqlalchemy.select(*map(_not_zero, KINDS)).where(*seen)).one())
    _check_number(of_tokens + len(made) + of_storage, window)
    data = [event for row in session.exec(select(UsageRow).where(*seen)) for event in _events(row, caller)]
    data += _made_events(made, caller)
    data += _stored_events(stored, caller, window)
    data.sort(key=lambda event: (event.bucket_start, -getattr(event.event_info, "token_count", -1)))
    sessions = {event.session_id: rest.UsageSession() for event in data if event.session_id is not None}
    for session_id, told in sessions.items():
        if (row := session.get(SessionRow, session_id)) is not None:
            told.user_metadata = rest.texts(row.user_metadata)
    return rest.UsageResponse(data=data, sessions=sessions)


def _not_zero(column: Any) -> ColumnElement[int]:
    """Expression for the number of rows in which a column is not 0."""
    return func.count(case((column > 0, 1)))


def _check_number(number: int, window: Window) -> None:
    hours = (window.end - window.begin) // HOUR_S
    if number > MOST_EVENTS and hours > 1:
        begin, end = (rest.moment(moment).isoformat() for moment in (window.begin, window.end))
        raise RequestError(
            f"starting_on={begin}, ending_before={end}: the window has {number} usage events, and {MOST_EVENTS} are "
            f"the most of an answer; ask for windows of {max(1, hours * MOST_EVENTS // number)} hours or less"
        )


def _events(row: UsageRow, caller: Caller) -> Iterator[rest.UsageEvent]:
    """Events of a row, one per kind of tokens.

    Device seconds are reported in one event only. The seconds of passes and steps are in the event of trained tokens
    or, in an hour with forward tokens only, of forward tokens. The seconds of samples are in the event of sampled
    tokens.
    """
    trained, forward = (
        rest.TrainingUsage(forward_only=only, token_count=count)
        for only, count in ((False, row.trained_tokens), (True, row.forward_tokens))
    )
    prefill, cached = (
        rest.PrefillUsage(cached=found, token_count=count)
        for found, count in ((False, row.prefill_tokens), (True, row.cached_tokens))
    )
    sampled = rest.SampleUsage(token_count=row.sampled_tokens, sample_count=row.samples)
    only_forward = row.forward_tokens > 0 and not row.trained_tokens
    kinds = (
        (trained, TRAIN_FLOPS, None if only_forward else row.training_s),
        (forward, FORWARD_FLOPS, row.training_s if only_forward else None),
        (prefill, FORWARD_FLOPS, None),
        (cached, 0, None),
        (sampled, FORWARD_FLOPS, row.sampling_s),
    )
    for info, operations, seconds in kinds:
        if info.token_count or seconds or (info is sampled and sampled.sample_count):
            yield rest.UsageEvent(
                **_of_hour(row.hour, caller, row.base_model, row.project_id, row.model_id),
                session_id=row.session_id,
                flops=None if row.active_parameters is None else operations * row.active_parameters * info.token_count,
                device_seconds=seconds,
                event_info=info,
            )


def _of_hour(hour: int, caller: Caller, base_model: str, project_id: str | None, model_id: str) -> dict[str, Any]:
    return {
        "bucket_start": rest.moment(hour),
        "bucket_end": rest.moment(hour + HOUR_S),
        "base_model": base_model,
        "user_id": caller.urn,
        "user_name": caller.display_name,
        "project_id": project_id,
        "training_run_id": model_id or None,
    }


Place = tuple[str, str | None, str | None, str]
"""Model id, session id, project id and base model of checkpoints."""


Made = Counter[tuple[int, *Place]]
Stored = dict[tuple[str, str | None, str], np.ndarray]


def _made(session: Session, caller: Caller, window: Window) -> Made:
    """Number of created checkpoints by hour and place."""
    rows = _audited(session, caller, "checkpoint_create", AuditRow.created_at < window.end, window.begin)
    place_of = _places(session)
    return Counter((int(row.created_at) // HOUR_S * HOUR_S, *place_of(row.details)) for row in rows)


def _made_events(made: Made, caller: Caller) -> Iterator[rest.UsageEvent]:
    for (hour, model_id, session_id, project_id, base_model), count in made.items():
        yield rest.UsageEvent(
            **_of_hour(hour, caller, base_model, project_id, model_id),
            session_id=session_id,
            event_info=rest.CheckpointUsage(count=count),
        )


def _stored(session: Session, caller: Caller, window: Window, now: float) -> Stored:
    """Storage of named checkpoints in gigabyte-hours for each hour of the window, by model, project and base model.

    Includes checkpoints that were deleted later.
    """
    edges = np.arange(window.begin, window.end + HOUR_S, HOUR_S)
    total: defaultdict[tuple[str, str | None, str], np.ndarray] = defaultdict(lambda: np.zeros(len(edges) - 1))

    def count(model_id: str, project_id: str | None, base_model: str, size: int, since: float, until: float) -> None:
        total[model_id, project_id, base_model] += gigabyte_hours(edges, size, since, min(until, now))

    there = select(CheckpointRow, SessionRow.project_id).where(
        _owned(CheckpointRow.tenant, caller), CheckpointRow.created_at < window.end
    )
    for row, project_id in session.exec(_with_session(there)):
        count(row.model_id, project_id, row.base_model, row.size_bytes or 0, row.created_at, now)
    place_of = _places(session)
    for row in _audited(session, caller, "checkpoint_delete", true(), window.begin):
        model_id, _, project_id, base_model = place_of(row.details)
        size, since = row.details["size_bytes"] or 0, row.details["stored_since"]
        count(model_id, project_id, base_model, size, since, row.created_at)
    return total


def gigabyte_hours(edges: np.ndarray, size_bytes: int, since: float, until: float) -> np.ndarray:
    """Return the storage of `size_bytes` from `since` to `until` in gigabyte-hours, for each period between edges."""
    starts, lengths = edges[:-1], np.diff(edges)
    seconds = np.clip(until - starts, 0, lengths) - np.clip(since - starts, 0, lengths)
    return seconds.clip(min=0) / HOUR_S * size_bytes / GIGABYTE


def _stored_events(stored: Stored, caller: Caller, window: Window) -> Iterator[rest.UsageEvent]:
    for (model_id, project_id, base_model), amounts in sorted(stored.items(), key=lambda item: item[0][0]):
        for place in np.flatnonzero(amounts):
            hour = window.begin + int(place) * HOUR_S
            yield rest.UsageEvent(
                **_of_hour(hour, caller, base_model, project_id, model_id),
                event_info=rest.StorageUsage(gigabyte_hours=float(amounts[place])),
            )


def _audited(
    session: Session, caller: Caller, event: str, also: ColumnElement[bool] | bool, since: float
) -> list[AuditRow]:
    seen = [_owned(AuditRow.tenant, caller), col(AuditRow.created_at) >= since, AuditRow.event == event, also]
    return list(session.exec(select(AuditRow).where(*seen)).all())


def _places(session: Session) -> Callable[[dict[str, Any]], Place]:
    """Return a function that reads a checkpoint's place from the details of an audit event.

    The project is the session's current project, or the event's project if the session was removed.
    """
    found: dict[str, SessionRow | None] = {}

    def place_of(details: dict[str, Any]) -> Place:
        session_id, project_id = details["session_id"], details["project_id"]
        if session_id is not None:
            if session_id not in found:
                found[session_id] = session.get(SessionRow, session_id)
            owner = found[session_id]
            project_id = project_id if owner is None else owner.project_id
        return details["model_id"], session_id, project_id, details["base_model"]

    return place_of


def stored_now(session: Session, caller: Caller, project_id: str | None, now: float) -> rest.StoredNowResponse:
    """Return the number and size of the caller's named checkpoints, by project."""
    query = _with_session(select(CheckpointRow, SessionRow.project_id).where(_owned(CheckpointRow.tenant, caller)))
    sizes: defaultdict[str | None, list[int]] = defaultdict(list)
    for row, project in session.exec(query):
        unexpired = row.expires_at is None or row.expires_at > now
        if unexpired and project_id in (None, project):
            sizes[project].append(row.size_bytes or 0)
    return rest.StoredNowResponse(
        data=[
            rest.StoredNow(
                project_id=project,
                org_user_urn=caller.urn,
                user_email=caller.email,
                user_name=caller.display_name,
                checkpoint_count=len(found),
                size_bytes=sum(found),
                size_gigabytes=sum(found) / GIGABYTE,
            )
            for project, found in sorted(sizes.items(), key=lambda item: item[0] or "")
        ]
    )


def audit_log(session: Session, caller: Caller, kind: AuditType, day: date | None) -> rest.AuditResponse:
    """Return the audit events of a day, midnight to midnight UTC, for objects of the caller."""
    begin = datetime.combine(day or datetime.now(UTC).date(), time(), UTC)
    seen = [
        _owned(AuditRow.tenant, caller),
        col(AuditRow.created_at) >= begin.timestamp(),
        col(AuditRow.created_at) < (begin + timedelta(days=1)).timestamp(),
    ]
    rows = session.exec(select(AuditRow).where(*seen).order_by(col(AuditRow.created_at), col(AuditRow.id)))
    entries = [
        rest.AuditEntry(
            timestamp=rest.moment(row.created_at),
            event=row.event,
            event_details=row.details,
            **{name: row.details.get(name) for name in ("model_id", "tinker_path", "purpose")},
        )
        for row in rows
        if kind == "all" or row.event.startswith(f"{kind.removesuffix('s')}_")
    ]
    return rest.AuditResponse(entries=entries)


def _owned(tenant: Any, caller: Caller) -> ColumnElement[bool]:
    return true() if caller.tenant is None else col(tenant) == caller.tenant


def _with_session(query: Any) -> Any:
    """Join a query of checkpoints with the session of each checkpoint's run. A removed session gives NULL."""
    run = ModelRow.model_id == CheckpointRow.model_id
    return query.outerjoin(ModelRow, run).outerjoin(SessionRow, SessionRow.session_id == ModelRow.session_id)
