"""Copies of checkpoints: a run that cannot be trained, which holds a checkpoint with the name of the one it is made of.

A copy is logged as its run's request 0, so that a client that sends it again gets the same copy, and so that the place
in the session is taken.
"""

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass

from sqlmodel import Session, select

from skyrl.errors import RequestError, StorageError
from skyrl.tinker.context import Service
from skyrl.tinker.database.checkpoint_rows import expiry
from skyrl.tinker.database.decisions import Decisions
from skyrl.tinker.database.request_log import result_row
from skyrl.tinker.database.tables import CheckpointRow, ModelRow, RequestRow, SessionRow
from skyrl.tinker.errors import DatabaseFull
from skyrl.tinker.identity import ids
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import TinkerPath
from skyrl.tinker.operations.checkpoint_access import readable_checkpoint
from skyrl.tinker.results import JSON
from skyrl.tinker.wire import management_schemas as rest
from skyrl.tinker.wire import strict_json
from skyrl.utils.atomic_folders import copy_folder, remove_folder

log = logging.getLogger(__name__)

KIND = "copy_weights"


@dataclass(frozen=True)
class Place:
    """Where a copy goes."""

    session_id: str
    model_seq_id: int
    tenant: str
    request_id: str
    """Equal for equal requests."""
    new_session_in: str | None
    """The project of the session to make; None: the session is there."""

    @property
    def model_id(self) -> str:
        return ids.model_id(self.session_id, self.model_seq_id)


async def copy_checkpoint(
    service: Service, caller: Caller, request: rest.CopyWeightsRequest, idempotency_key: str | None
) -> TinkerPath:
    """Make a copy. Returns its path, that of an earlier copy if the request was sent before.

    Raises `RequestError`.
    """
    path = TinkerPath.parse("source_path", request.source_path)
    source = await readable_checkpoint(service, "source_path", path, caller, request.weights_access_token)
    place = await _place(service, caller, request, idempotency_key)
    copying = service.copying.setdefault(place.request_id, asyncio.Lock())
    async with copying:  # of two equal requests the second finds the first
        earlier = await service.database.read(lambda session: _earlier(session, place))
        if earlier is not None:
            return earlier
        await service.disk.make_room(source.model_id, sampler=source.kind != "weights")
        copy = _copy_of(source, place, request.ttl_seconds)
        try:
            await asyncio.to_thread(copy_folder, service.path_of(source.folder), service.path_of(copy.folder))
        except StorageError as error:
            log.error("%s cannot be copied: %s", path, error)
            raise RequestError(f"source_path={path}: its files are missing or damaged, or the disk is full") from error
        try:
            await service.database.write(lambda session: _record(session, place, source, copy))
        except DatabaseFull:  # after any other error it may be stored; a folder without a name goes by itself
            await asyncio.to_thread(remove_folder, service.path_of(copy.folder))
            raise
        return _path(copy)


async def _place(
    service: Service, caller: Caller, request: rest.CopyWeightsRequest, idempotency_key: str | None
) -> Place:
    if request.session_id is not None and request.model_seq_id is not None:
        row = await service.directory.session(request.session_id, caller)
        if row.finished_at is not None:
            raise RequestError(f"session {request.session_id} is finished; start a new ServiceClient")
        request_id = f"{KIND}-{ids.model_id(request.session_id, request.model_seq_id)}"
        return Place(request.session_id, request.model_seq_id, row.tenant, request_id, None)
    session_id = ids.new_session_id()
    key = f"{caller.name}\0{idempotency_key}" if idempotency_key else session_id
    request_id = f"{KIND}-{hashlib.sha256(key.encode()).hexdigest()}"
    return Place(session_id, 0, caller.tenant_of(session_id), request_id, request.destination_project_id)


def _earlier(session: Session, place: Place) -> TinkerPath | None:
    """The copy that an equal request has made. Raises `RequestError` if something else has its place."""
    row = session.get(RequestRow, place.request_id)
    if row is not None:
        copy = session.exec(select(CheckpointRow).where(CheckpointRow.model_id == row.model_id)).first()
        if copy is None:
            raise RequestError("this copy was made before and has been deleted since; send a new request")
        return _path(copy)
    taken = select(RequestRow.request_id).where(RequestRow.model_id == place.model_id)
    if session.get(ModelRow, place.model_id) is not None or session.exec(taken).first() is not None:
        raise RequestError(f"model_seq_id={place.model_seq_id} is in use in this session; use the next one")
    return None


def _copy_of(source: CheckpointRow, place: Place, ttl_seconds: int | None) -> CheckpointRow:
    path = TinkerPath.parse("source_path", f"{ids.SCHEME}{source.model_id}/{source.kind}/{source.name}")
    assert path.kind is not None
    return CheckpointRow(
        model_id=place.model_id,
        kind=source.kind,
        name=source.name,
        tenant=place.tenant,
        version=ids.version_id(place.model_id, 0),
        folder=ids.folder(place.model_id, path.kind, f"{source.name}@0"),
        base_model=source.base_model,
        lora_config=source.lora_config,
        user_metadata=source.user_metadata,
        size_bytes=source.size_bytes,
        digest=source.digest,
        expires_at=expiry(ttl_seconds),
    )


def _record(session: Session, place: Place, source: CheckpointRow, copy: CheckpointRow) -> None:
    """Give a copy that is on disk its run and its name. Raises `RequestError` if its place was taken meanwhile."""
    _earlier(session, place)
    if place.new_session_in is not None:
        session.add(SessionRow(session_id=place.session_id, tenant=place.tenant, project_id=place.new_session_in))
    run = ModelRow(
        model_id=place.model_id,
        session_id=place.session_id,
        tenant=place.tenant,
        base_model=source.base_model,
        lora_config=source.lora_config,
        status="copy",
    )
    now = time.time()
    request = RequestRow(
        request_id=place.request_id,
        kind=KIND,
        tenant=place.tenant,
        model_id=place.model_id,
        seq_id=0,
        decided=Decisions(saved_to=copy.folder),
        body=b"",
        content_type=JSON,
        status="done",
        finished_at=now,
    )
    result = result_row(place.request_id, strict_json.dumps({"tinker_path": str(_path(copy))}), JSON, now)
    session.add_all([run, request, result, CheckpointRow(**copy.model_dump())])


def _path(copy: CheckpointRow) -> TinkerPath:
    return TinkerPath.parse("path", f"{ids.SCHEME}{copy.model_id}/{copy.kind}/{copy.name}")
