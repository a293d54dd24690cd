"""Sessions: one per client process. An idle session stays; a finished one accepts no more requests."""

import logging
import time
from functools import partial
from typing import Annotated

from fastapi import APIRouter
from sqlmodel import Session
from starlette.exceptions import HTTPException
from starlette.responses import Response

from skyrl.tinker.database.ledger import audit, charges
from skyrl.tinker.database.queries import listings, search
from skyrl.tinker.database.tables import SessionRow
from skyrl.tinker.http.routes.dependencies import (
    CallerDependency,
    Limit,
    Offset,
    QueueDependency,
    ServiceDependency,
    json_body,
)
from skyrl.tinker.identity import ids
from skyrl.tinker.wire import management_schemas as rest
from skyrl.tinker.wire import schemas, search_schemas

log = logging.getLogger(__name__)

router = APIRouter()

MAX_SESSION_BYTES = 2**16
"""Maximum size of the request for a session, whose tags and metadata stay in the database."""
MOST_DETAIL = 1000
"""Maximum characters that are logged of a client's message about the end of a session."""


@router.post("/create_session", response_model_exclude_none=True)
async def create_session(
    service: ServiceDependency,
    caller: CallerDependency,
    request: Annotated[
        schemas.CreateSessionRequest, json_body(schemas.CreateSessionRequest, max_bytes=MAX_SESSION_BYTES)
    ],
) -> schemas.CreateSessionResponse:
    """Create a session."""
    session_id = ids.new_session_id()

    def insert(session: Session) -> None:
        row = SessionRow(
            session_id=session_id,
            tenant=caller.tenant_of(session_id),
            tags=request.tags,
            user_metadata=request.user_metadata,
            sdk_version=request.sdk_version,
            project_id=request.project_id,
            display_name=request.display_name,
        )
        session.add(row)

    await service.database.write(insert)
    return schemas.CreateSessionResponse(session_id=session_id)


@router.post("/session_heartbeat")
async def session_heartbeat(
    service: ServiceDependency,
    caller: CallerDependency,
    request: Annotated[schemas.SessionHeartbeatRequest, json_body(schemas.SessionHeartbeatRequest)],
) -> schemas.SessionHeartbeatResponse:
    """Record that a client is alive. Status 410 tells the client of a finished session to stop."""
    row = await service.directory.session(request.session_id, caller)
    if row.finished_at is not None:
        raise HTTPException(410, f"session {request.session_id} is finished")
    service.activity.seen(row.session_id)
    return schemas.SessionHeartbeatResponse()


@router.post("/sessions/{session_id}/finish", status_code=204, response_class=Response)
async def finish_session(
    session_id: str,
    service: ServiceDependency,
    queue: QueueDependency,
    caller: CallerDependency,
    request: Annotated[schemas.FinishSessionRequest, json_body(schemas.FinishSessionRequest)],
) -> None:
    """End a session. If it is ended again, the first reason is kept.

    The session's models leave the engine. Their checkpoints can still be loaded.
    """
    await service.directory.session(session_id, caller)

    def finish(session: Session) -> None:
        row = session.get(SessionRow, session_id)
        if row is not None and row.finished_at is None:
            row.finished_at = time.time()
            row.finish_reason = request.reason.type if request.reason else None

    await service.database.write(finish)
    if request.detail is not None:
        log.info("session %s was finished: %s", session_id, " ".join(request.detail[:MOST_DETAIL].split()))
    service.directory.forget(session_id)
    queue.park(session_id)


@router.get("/sessions", response_model=rest.ListSessionsResponse)
async def list_sessions(
    service: ServiceDependency,
    caller: CallerDependency,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: listings.Scope = "owned",
) -> Response:
    """The caller's sessions, newest first. Sessions of others are never accessible, whatever the scope."""
    return await service.listings.answer(caller, partial(listings.sessions, caller=caller, limit=limit, offset=offset))


@router.post("/sessions/search", response_model=search_schemas.SessionSearchResponse)
async def search_sessions(
    service: ServiceDependency,
    caller: CallerDependency,
    request: Annotated[search_schemas.SessionSearchRequest, json_body(search_schemas.SessionSearchRequest)],
) -> Response:
    """Sessions that match, newest first."""
    return await service.listings.answer(caller, partial(search.search_sessions, caller=caller, request=request))


@router.get("/sessions/{session_id}", response_model=rest.GetSessionResponse)
async def get_session(
    session_id: str, service: ServiceDependency, caller: CallerDependency, access_scope: listings.Scope = "owned"
) -> Response:
    """The runs and samplers of a session."""
    row = await service.directory.session(session_id, caller)
    return await service.listings.answer(caller, partial(listings.session_contents, row=row))


@router.put("/sessions/{session_id}/project", status_code=204, response_class=Response)
async def set_project(
    session_id: str,
    service: ServiceDependency,
    caller: CallerDependency,
    request: Annotated[rest.SetProjectRequest, json_body(rest.SetProjectRequest)],
) -> None:
    """Move a session, with its runs, to a project."""
    await service.directory.session(session_id, caller)

    def move(session: Session) -> None:
        row = session.get(SessionRow, session_id)
        if row is not None:
            row.project_id = request.project_id
            charges.move(session, session_id, request.project_id)
            details = {"session_id": session_id, "project_id": request.project_id}
            audit.note(session, "project_session_set", row.tenant, caller.name, **details)

    await service.database.write(move)
    service.directory.forget(session_id)
