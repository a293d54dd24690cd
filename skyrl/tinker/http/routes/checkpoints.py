"""Named checkpoints: list, publish, expire, delete. Only the owner can change a checkpoint.

A repeated change is no error, because clients retry when an answer is lost.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated

from fastapi import APIRouter
from sqlmodel import Session
from starlette.responses import Response

from skyrl.tinker.context import Service
from skyrl.tinker.database.ledger.audit import note_checkpoint
from skyrl.tinker.database.queries import checkpoint_rows, listings, search
from skyrl.tinker.database.queries.checkpoint_rows import (
    DeletedCheckpoint,
    expiry,
    find_checkpoint,
    own_checkpoint,
    was_saved,
)
from skyrl.tinker.http.routes.dependencies import (
    CallerDependency,
    Limit,
    Offset,
    PathDependency,
    QueueDependency,
    ServiceDependency,
    json_body,
)
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import TinkerPath
from skyrl.tinker.wire import management_schemas as rest
from skyrl.tinker.wire.search_schemas import CheckpointSearchRequest, CheckpointSearchResponse

router = APIRouter()

CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


@router.get("/checkpoints", response_model=rest.CheckpointsListResponse)
async def list_checkpoints(
    service: ServiceDependency, caller: CallerDependency, limit: Limit = 100, offset: Offset = 0
) -> Response:
    """The caller's checkpoints of all runs, newest first."""
    return await service.listings.answer(
        caller, partial(listings.checkpoints, caller=caller, limit=limit, offset=offset)
    )


@router.post("/checkpoints/search", response_model=CheckpointSearchResponse)
async def search_checkpoints(
    service: ServiceDependency,
    caller: CallerDependency,
    request: Annotated[CheckpointSearchRequest, json_body(CheckpointSearchRequest)],
) -> Response:
    """Checkpoints that match, newest first."""
    return await service.listings.answer(caller, partial(search.search_checkpoints, caller=caller, request=request))


@router.delete(CHECKPOINT, status_code=204, response_class=Response)
async def delete_checkpoint(
    path: PathDependency, service: ServiceDependency, queue: QueueDependency, caller: CallerDependency
) -> None:
    """Delete a checkpoint permanently. Its name is removed at once, and its files when nothing reads them any more."""

    def known(session: Session) -> None:
        if find_checkpoint(session, path) is None and was_saved(session, path, caller):
            return
        own_checkpoint(session, path, caller)

    def forget(session: Session) -> DeletedCheckpoint | None:
        if find_checkpoint(session, path) is None:
            return None  # deleted already, before or after the check
        return checkpoint_rows.delete_checkpoint(session, own_checkpoint(session, path, caller), caller.name)

    await service.database.read(known)
    deleted = await service.database.write(forget)
    if deleted is not None:
        service.directory.forget(*deleted.samplers)
        await queue.discard(deleted.files)


@router.post(f"{CHECKPOINT}/publish", status_code=204, response_class=Response)
async def publish_checkpoint(path: PathDependency, service: ServiceDependency, caller: CallerDependency) -> None:
    """Make a checkpoint readable by every key."""
    await _share(path, service, caller, True)


@router.delete(f"{CHECKPOINT}/publish", status_code=204, response_class=Response)
async def unpublish_checkpoint(path: PathDependency, service: ServiceDependency, caller: CallerDependency) -> None:
    """Make a checkpoint readable by its owner only."""
    await _share(path, service, caller, False)


@router.put(f"{CHECKPOINT}/ttl", status_code=204, response_class=Response)
async def set_ttl(
    path: PathDependency,
    service: ServiceDependency,
    caller: CallerDependency,
    request: Annotated[rest.SetTtlRequest, json_body(rest.SetTtlRequest)],
) -> None:
    """Set the time to live of a checkpoint; null: it never expires."""

    def change(session: Session) -> None:
        row = own_checkpoint(session, path, caller)
        row.expires_at = expiry(request.ttl_seconds)
        note_checkpoint(session, "checkpoint_ttl_set", row, caller.name, ttl_seconds=request.ttl_seconds)

    await _change(path, service, caller, change)


async def _share(path: TinkerPath, service: Service, caller: Caller, public: bool) -> None:
    def change(session: Session) -> None:
        row = own_checkpoint(session, path, caller)
        if row.public != public:
            note_checkpoint(session, "checkpoint_publish" if public else "checkpoint_unpublish", row, caller.name)
        row.public = public

    await _change(path, service, caller, change)


async def _change(path: TinkerPath, service: Service, caller: Caller, change: Callable[[Session], None]) -> None:
    """Change a checkpoint of the caller.

    An unknown checkpoint, or one of another tenant, is rejected before the database writer is used.
    """
    await service.database.read(lambda session: own_checkpoint(session, path, caller))
    await service.database.write(change)
