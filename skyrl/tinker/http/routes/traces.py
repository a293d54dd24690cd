"""The trace of a session: a link to it, and the file."""

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException

from skyrl.tinker.http.routes.dependencies import CallerDependency, QueueDependency, ServiceDependency
from skyrl.tinker.http.routes.links import end_of_link, link
from skyrl.tinker.identity.tokens import BadToken
from skyrl.tinker.results import JSON
from skyrl.tinker.traces import PIECE_BYTES, text
from skyrl.tinker.wire import management_schemas as rest

router = APIRouter()
public = APIRouter()
"""Routes that need no key."""


@router.get("/sessions/{session_id}/trace_export", response_model_exclude_none=True)
async def trace_export(
    session_id: str, request: Request, service: ServiceDependency, caller: CallerDependency
) -> rest.TraceExportResponse:
    """A link to the trace of one of the caller's sessions. The trace is created on download, so it is always ready."""
    row = await service.directory.session(session_id, caller)
    expires, claims = end_of_link(caller), {"session_id": row.session_id, "sharer": caller.sharer}
    token = service.keys.signer.sign("trace", claims, expires)
    url = link(request, service, "trace", token, f"{row.session_id}.json")
    return rest.TraceExportResponse(status="ready", url=url)


@public.get("/traces/{token}/{name}", response_model=None, responses={200: {"content": {JSON: {}}}})
async def trace(token: str, name: str, service: ServiceDependency, queue: QueueDependency) -> Response:
    """Requests of a session since the API process started, in Chrome's trace event format."""
    try:
        claims = service.keys.signer.read("trace", token)
    except BadToken as error:
        raise HTTPException(403, f"the link {error}; ask for another") from error
    session_id = claims["session_id"]
    pieces = text(session_id, queue.futures.timelines_of(session_id))
    headers = {"Content-Disposition": f'attachment; filename="{session_id}.json"'}
    return StreamingResponse(
        service.decode_pool.pieces(claims["sharer"], PIECE_BYTES, pieces), headers=headers, media_type=JSON
    )
