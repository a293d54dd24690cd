"""Search for checkpoints and sessions. The cursor of a page names its last row rather than an offset, so concurrent
changes do not shift the next page.
"""

import time
from collections.abc import Iterator
from itertools import islice
from uuid import UUID

from sqlalchemy import func
from sqlmodel import Session, col, select

from skyrl.tinker.database.queries import listings
from skyrl.tinker.database.queries.listings import unexpired
from skyrl.tinker.database.tables import CheckpointRow, ModelRow, SessionRow
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.wire import management_schemas as rest
from skyrl.tinker.wire.schemas import FinishReason
from skyrl.tinker.wire.search_schemas import (
    CheckpointSearchCursor,
    CheckpointSearchRequest,
    CheckpointSearchResponse,
    SearchCursor,
    SearchStatus,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionStatus,
    SessionSummary,
)

ACTIVE_S = 300
"""Seconds after its last activity for which a session counts as active."""
NO_PROJECT = "default"
"""Project of a session without a project, in requests and answers."""
ROUNDING_S = 1e-3
"""Upper bound, in seconds, of the rounding error of a time that a client sends back."""


def search_sessions(session: Session, caller: Caller, request: SessionSearchRequest) -> SessionSearchResponse:
    """Return a page of the caller's matching sessions. A job for `Database.read`."""
    found = list(islice(_matching_sessions(session, caller, request), request.limit + 1))
    page = found[: request.limit]
    sizes = _checkpoints(session, [row.session_id for row in page])
    cursor = None
    if len(found) > len(page):
        cursor = SearchCursor(last_created_at=rest.moment(page[-1].created_at), last_session_id=page[-1].session_id)
    return SessionSearchResponse(
        sessions=[_summary(row, caller, *sizes.get(row.session_id, (0, 0))) for row in page], next_cursor=cursor
    )


def _matching_sessions(session: Session, caller: Caller, request: SessionSearchRequest) -> Iterator[SessionRow]:
    """Yield matching sessions, newest first."""
    if request.owner.owner_urns is not None and caller.urn not in request.owner.owner_urns:
        return
    query = select(SessionRow).order_by(col(SessionRow.created_at).desc(), col(SessionRow.session_id).desc())
    if caller.tenant is not None:
        query = query.where(SessionRow.tenant == caller.tenant)
    if request.session_id is not None and request.display_name is None:
        query = query.where(SessionRow.session_id == request.session_id)
    cursor = request.cursor
    if cursor is not None:
        query = query.where(SessionRow.created_at <= cursor.last_created_at.timestamp() + ROUNDING_S)
    for row in session.exec(query.execution_options(yield_per=200)):
        behind = (cursor.last_created_at, cursor.last_session_id) if cursor is not None else None
        if (behind is None or (rest.moment(row.created_at), row.session_id) < behind) and _matches(row, request):
            yield row


def _matches(row: SessionRow, request: SessionSearchRequest) -> bool:
    named = []
    if request.session_id is not None:
        named.append(row.session_id == request.session_id)
    if request.display_name is not None:
        name = (row.display_name or "").casefold()
        named.append(all(word in name for word in request.display_name.casefold().split()))
    metadata = rest.texts(row.user_metadata) or {}
    return (
        (not named or any(named))
        and (request.project_ids is None or _project(row) in request.project_ids)
        and request.user_metadata.items() <= metadata.items()
        and (request.statuses is None or any(_has_status(row, status) for status in request.statuses))
    )


def _has_status(row: SessionRow, wanted: SearchStatus) -> bool:
    status = _status(row)
    if status is None or status.type != wanted.type:
        return False
    return wanted.reasons is None or (status.reason is not None and status.reason.type in wanted.reasons)


def _status(row: SessionRow) -> SessionStatus | None:
    if row.finished_at is not None:
        reason = FinishReason.model_validate({"type": row.finish_reason or "success"})
        return SessionStatus(type="client_finished", reason=reason)
    return SessionStatus(type="active") if row.last_seen_at > time.time() - ACTIVE_S else None


def _project(row: SessionRow) -> str:
    return row.project_id or NO_PROJECT


def _checkpoints(session: Session, session_ids: list[str]) -> dict[str, tuple[int, int]]:
    """Return (number, bytes) of each session's checkpoints."""
    query = (
        select(ModelRow.session_id, func.count(), func.sum(CheckpointRow.size_bytes))
        .join(CheckpointRow, col(CheckpointRow.model_id) == col(ModelRow.model_id))
        .where(col(ModelRow.session_id).in_(session_ids), unexpired())
        .group_by(col(ModelRow.session_id))
    )
    return {session_id: (count, int(size or 0)) for session_id, count, size in session.exec(query)}


def _summary(row: SessionRow, caller: Caller, checkpoints: int, size_bytes: int) -> SessionSummary:
    return SessionSummary(
        session_id=row.session_id,
        created_at=rest.moment(row.created_at),
        owner=caller.urn,
        project_id=_project(row),
        status=_status(row),
        checkpoints_count=checkpoints,
        display_name=row.display_name,
        user_metadata=rest.texts(row.user_metadata),
        checkpoint_storage_bytes=size_bytes,
    )


def search_checkpoints(session: Session, caller: Caller, request: CheckpointSearchRequest) -> CheckpointSearchResponse:
    """Return a page of matching checkpoints. A job for `Database.read`."""
    found = list(islice(_matching_checkpoints(session, caller, request), request.limit + 1))
    page = found[: request.limit]
    cursor = None
    if len(found) > len(page):
        cursor = CheckpointSearchCursor(
            last_created_at=rest.moment(page[-1].created_at), last_checkpoint_uuid=_uuid(page[-1])
        )
    return CheckpointSearchResponse(checkpoints=[listings.checkpoint(row) for row in page], next_cursor=cursor)


def _matching_checkpoints(
    session: Session, caller: Caller, request: CheckpointSearchRequest
) -> Iterator[CheckpointRow]:
    """Yield matching checkpoints, newest first."""
    owners = request.owner.owner_urns
    if owners is not None and caller.urn not in owners:
        return
    visible = listings.readable(caller) if request.owner.type == "accessible" else listings.own_checkpoints(caller)
    query = (
        select(CheckpointRow, SessionRow.project_id)
        .join(ModelRow, col(ModelRow.model_id) == col(CheckpointRow.model_id), isouter=True)
        .join(SessionRow, col(SessionRow.session_id) == col(ModelRow.session_id), isouter=True)
        .where(visible)
        .order_by(*listings.newest_first())
    )
    if request.checkpoint_type is not None:
        query = query.where(CheckpointRow.kind == rest.KINDS[request.checkpoint_type])
    if request.base_models is not None:
        query = query.where(col(CheckpointRow.base_model).in_(request.base_models))
    cursor = request.cursor
    if cursor is not None:
        query = query.where(CheckpointRow.created_at <= cursor.last_created_at.timestamp() + ROUNDING_S)
    behind = (cursor.last_created_at, cursor.last_checkpoint_uuid) if cursor is not None else None
    for row, project_id in session.exec(query.execution_options(yield_per=200)):
        if (
            (behind is None or (rest.moment(row.created_at), _uuid(row)) < behind)
            and (request.project_ids is None or (project_id or NO_PROJECT) in request.project_ids)
            and request.user_metadata.items() <= (row.user_metadata or {}).items()
        ):
            yield row


def _uuid(row: CheckpointRow) -> UUID:
    """Return the row's number as a UUID. UUIDs sort like the numbers."""
    assert row.id is not None, "it is stored"
    return UUID(int=row.id)
