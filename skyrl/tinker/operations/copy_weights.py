"""Copies of checkpoints. A copy has the name of its original."""

import asyncio
import hashlib
import logging

from sqlmodel import Session

from skyrl.errors import DamagedFiles, RequestError
from skyrl.tinker.context import Service
from skyrl.tinker.database.ledger.audit import note_checkpoint
from skyrl.tinker.database.queries.checkpoint_rows import expiry
from skyrl.tinker.database.tables import CheckpointRow
from skyrl.tinker.errors import DatabaseFull
from skyrl.tinker.identity import ids
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import TinkerPath
from skyrl.tinker.operations.checkpoint_access import readable_checkpoint
from skyrl.tinker.operations.held_checkpoints import RunPosition, earlier, path_of, record
from skyrl.tinker.wire import management_schemas as rest
from skyrl.utils.files.stored_folders import copy_stored, remove_stored

log = logging.getLogger(__name__)

KIND = "copy_weights"


async def copy_checkpoint(
    service: Service, caller: Caller, request: rest.CopyWeightsRequest, idempotency_key: str | None
) -> TinkerPath:
    """Copy a checkpoint. Returns the path of the copy, or of an earlier copy by the same request.

    Raises `RequestError`, also for missing or damaged files, and `StorageError` if the disk or the bucket fails.
    """
    path = TinkerPath.parse("source_path", request.source_path)
    source = await readable_checkpoint(service, "source_path", path, caller, request.weights_access_token)
    place = await _place(service, caller, request, idempotency_key)
    copying = service.copying.setdefault(place.request_id, asyncio.Lock())
    async with copying:  # of two equal requests the second finds the first
        before = await service.database.read(lambda session: earlier(session, place))
        if before is not None:
            return before
        await service.disk.make_room(source.model_id, sampler=source.kind != "weights")
        copy = _copy_of(source, place, request.ttl_seconds)
        try:
            await asyncio.to_thread(copy_stored, service.path_of(source.folder), service.path_of(copy.folder))
        except DamagedFiles as error:
            log.error("%s cannot be copied: %s", path, error)
            raise RequestError(f"source_path={path}: its files are missing or damaged; use another one") from error
        try:
            await service.database.write(lambda session: _record(session, place, source, copy, caller.name))
        except DatabaseFull:  # after another error, the row may be stored; if not, the collector removes the folder
            await asyncio.to_thread(remove_stored, service.path_of(copy.folder))
            raise
        return path_of(copy)


async def _place(
    service: Service, caller: Caller, request: rest.CopyWeightsRequest, idempotency_key: str | None
) -> RunPosition:
    if request.session_id is not None and request.model_seq_id is not None:
        row = await service.directory.session(request.session_id, caller)
        if row.finished_at is not None:
            raise RequestError(f"session {request.session_id} is finished; start a new ServiceClient")
        request_id = f"{KIND}-{ids.model_id(request.session_id, request.model_seq_id)}"
        return RunPosition(request.session_id, request.model_seq_id, row.tenant, request_id, new_session=False)
    session_id = ids.new_session_id()
    key = f"{caller.name}\0{idempotency_key}" if idempotency_key else session_id
    request_id = f"{KIND}-{hashlib.sha256(key.encode()).hexdigest()}"
    return RunPosition(session_id, 0, caller.tenant_of(session_id), request_id, True, request.destination_project_id)


def _copy_of(source: CheckpointRow, place: RunPosition, ttl_seconds: int | None) -> CheckpointRow:
    path = path_of(source)
    assert path.kind is not None
    return CheckpointRow(
        model_id=place.model_id,
        kind=source.kind,
        name=source.name,
        tenant=place.tenant,
        version=place.version,
        folder=place.folder(path.kind, source.name),
        base_model=source.base_model,
        lora_config=source.lora_config,
        user_metadata=source.user_metadata,
        size_bytes=source.size_bytes,
        digest=source.digest,
        expires_at=expiry(ttl_seconds),
    )


def _record(session: Session, place: RunPosition, source: CheckpointRow, copy: CheckpointRow, by: str) -> None:
    """Store the run and the name of a copy that is on disk.

    Raises `RequestError` if the run's position was taken meanwhile.
    """
    note_checkpoint(session, "checkpoint_read", source, by, purpose="copy")
    record(session, KIND, place, copy, by)
