"""Operations that write files: checkpoints, sampler versions, exports."""

import asyncio
from typing import Any

from sqlmodel import Session

from skyrl.backends.operations import Publish, SaveCheckpoint
from skyrl.errors import RequestError
from skyrl.tinker.checkpoints.transfer import age_encryption
from skyrl.tinker.database.queries.checkpoint_rows import (
    SavedAs,
    UnreferencedFiles,
    refuse_taken_name,
    store_checkpoint,
)
from skyrl.tinker.database.tables import SamplerRow, VersionRow
from skyrl.tinker.identity import ids
from skyrl.tinker.operations.admission import Accepted, Admission
from skyrl.tinker.operations.models import _model_row
from skyrl.tinker.operations.operation import operation
from skyrl.tinker.wire import schemas
from skyrl.tinker.wire.parsing import ModelAddress, json_parser
from skyrl.types import SaveOutput


@operation("save_weights", json_parser(schemas.SaveWeightsRequest, ModelAddress))
async def save_weights(admission: Admission, request: schemas.SaveWeightsRequest) -> Accepted:
    """Write a named training checkpoint."""
    saved = SavedAs(
        admission.model,
        "weights",
        request.path,
        request.seq_id,
        request.overwrite,
        request.user_metadata,
        request.ttl_seconds,
    )
    path = await _path_of_save(admission, saved)
    operation = SaveCheckpoint(request_id=admission.request_id, model_id=request.model_id, path=path)

    def record(session: Session, result: SaveOutput) -> tuple[dict[str, Any], UnreferencedFiles | None]:
        obsolete = store_checkpoint(session, saved, result)
        return {"path": str(saved.path), "type": "save_weights"}, obsolete

    return Accepted(operation, record=record)


@operation("save_weights_for_sampler", json_parser(schemas.SaveWeightsForSamplerRequest, ModelAddress))
async def save_weights_for_sampler(admission: Admission, request: schemas.SaveWeightsForSamplerRequest) -> Accepted:
    """Publish the current weights as a version, either under a name or for a new sampler."""
    if request.path is None:
        if not admission.again:
            await admission.service.disk.make_room(request.model_id, sampler=True)
        return _publish_sampler(admission, request)
    if request.kind == "inflight":
        raise RequestError("kind=inflight names a sampler's weights, not a checkpoint's; leave out kind, or path")
    saved = SavedAs(
        admission.model,
        "sampler_weights",
        request.path,
        request.seq_id,
        overwrite=False,
        user_metadata=request.user_metadata,
        ttl_seconds=request.ttl_seconds,
    )
    path = await _path_of_save(admission, saved)
    operation = Publish(request_id=admission.request_id, model_id=request.model_id, version=saved.version, path=path)

    def record(session: Session, result: SaveOutput) -> tuple[dict[str, Any], UnreferencedFiles | None]:
        obsolete = store_checkpoint(session, saved, result)
        return {"path": str(saved.path), "type": "save_weights_for_sampler"}, obsolete

    return Accepted(operation, record=record)


async def _path_of_save(admission: Admission, saved: SavedAs) -> str:
    """Return the folder for a named checkpoint. Raises `RequestError` if the name is taken or there is no room."""
    if not admission.again:
        await refuse_taken_name(admission.service.database, saved)
        await admission.service.disk.make_room(saved.model.model_id, sampler=saved.kind != "weights")
    folder = admission.decided.saved_to = admission.decided.saved_to or saved.folder
    return admission.service.path_of(folder)


@operation("save_weights_external", json_parser(schemas.SaveWeightsExternalRequest, ModelAddress))
async def save_weights_external(admission: Admission, request: schemas.SaveWeightsExternalRequest) -> Accepted:
    """Write the current weights for use outside this server, encrypted if the request has recipients."""
    saved = SavedAs(
        admission.model,
        "external_weights",
        request.path,
        request.seq_id,
        overwrite=False,
        user_metadata=None,
        ttl_seconds=request.ttl_seconds,
    )
    recipients = request.age_encryption_recipients
    keys = None if recipients is None else age_encryption.read_recipients(recipients)
    path = await _path_of_save(admission, saved)
    assert admission.decided.saved_to is not None
    plain = str(admission.service.checkpoints / admission.decided.saved_to) if keys else path  # on disk only
    operation = Publish(request_id=admission.request_id, model_id=request.model_id, version=saved.version, path=plain)

    async def encrypt(_: SaveOutput) -> SaveOutput:
        return SaveOutput(path, *await asyncio.to_thread(age_encryption.encrypt_folder, plain, keys or (), path))

    def record(session: Session, result: SaveOutput) -> tuple[dict[str, Any], UnreferencedFiles | None]:
        obsolete = store_checkpoint(session, saved, result)
        payload = {"path": str(saved.path), "size_bytes": result.size_bytes, "type": "save_weights_external"}
        return payload, obsolete

    return Accepted(operation, complete=encrypt if keys else None, record=record)


def _publish_sampler(admission: Admission, request: schemas.SaveWeightsForSamplerRequest) -> Accepted:
    """Create a sampler of the current weights.

    All inflight samplers of a model switch to its newest inflight version.
    """
    for field in ("user_metadata", "ttl_seconds"):
        if getattr(request, field):
            raise RequestError(f"{field} belongs to named checkpoints; leave it out, or give the checkpoint a path")
    model, inflight = admission.model, request.kind == "inflight"
    assert request.sampling_session_seq_id is not None
    sampler_id = ids.sampler_id(model.session_id, request.sampling_session_seq_id)
    version = ids.version_id(model.model_id, request.seq_id)
    decided = admission.decided
    folder = decided.folder = decided.folder or ids.folder(model.model_id, "ephemeral", str(request.seq_id))
    decided.version = version
    operation = Publish(
        request_id=admission.request_id,
        model_id=model.model_id,
        version=version,
        path=admission.service.path_of(folder),
        persist=False,
    )

    def record(session: Session, _: SaveOutput) -> tuple[dict[str, Any], None]:
        answer = {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}
        if session.get(SamplerRow, sampler_id) is not None:
            if session.get(VersionRow, version) is not None:
                return answer, None  # stored by an earlier attempt whose outcome was not reported to us
            raise RequestError(
                f"sampling_session_seq_id={request.sampling_session_seq_id} is in use in this session; use the next one"
            )
        sampler = SamplerRow(
            sampler_id=sampler_id,
            session_id=model.session_id,
            tenant=model.tenant,
            kind=request.kind,
            base_model=model.base_model,
            model_id=model.model_id,
        )
        unwritten = VersionRow(
            version=version,
            model_id=model.model_id,
            session_id=model.session_id,
            tenant=model.tenant,
            folder=folder,
        )
        session.add(unwritten)
        if inflight:
            row = _model_row(session, model.model_id)
            row.inflight_version, row.inflight_folder = version, folder
        else:
            sampler.version, sampler.folder = version, folder
        session.add(sampler)
        return answer, None

    return Accepted(operation, record=record, changes=(model.model_id,))
