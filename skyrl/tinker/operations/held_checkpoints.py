"""Runs that only hold one checkpoint and cannot be trained: a copy, or an uploaded adapter.

The request that created such a run is logged as the run's request 0. If the client repeats the request, it gets the
same checkpoint. No other run can take the run's position in its session.
"""

import time
from dataclasses import dataclass

from sqlmodel import Session, select

from skyrl.errors import RequestError
from skyrl.tinker.database.decisions import Decisions
from skyrl.tinker.database.ledger.audit import note_checkpoint
from skyrl.tinker.database.log.request_log import result_row
from skyrl.tinker.database.tables import CheckpointRow, ModelRow, RequestRow, SessionRow
from skyrl.tinker.identity import ids
from skyrl.tinker.identity.ids import CheckpointKind, TinkerPath
from skyrl.tinker.results import JSON
from skyrl.tinker.wire import strict_json


@dataclass(frozen=True)
class RunPosition:
    """Position of a run that holds a checkpoint."""

    session_id: str
    model_seq_id: int
    tenant: str
    request_id: str
    """Id of the request, equal for equal requests."""
    new_session: bool
    """True if the session has to be created."""
    project_id: str | None = None
    """Project of a new session."""

    @property
    def model_id(self) -> str:
        return ids.model_id(self.session_id, self.model_seq_id)

    @property
    def version(self) -> str:
        """Version id of the checkpoint."""
        return ids.version_id(self.model_id, 0)

    def folder(self, kind: CheckpointKind, name: str) -> str:
        """Folder of the checkpoint, relative to checkpoints_base."""
        return ids.folder(self.model_id, kind, f"{name}@0")


def earlier(session: Session, place: RunPosition) -> TinkerPath | None:
    """Return the checkpoint of an earlier equal request, or None if there was no such request.

    Raises `RequestError` if this checkpoint was deleted, or if another run has the position.
    """
    row = session.get(RequestRow, place.request_id)
    if row is not None:
        held = session.exec(select(CheckpointRow).where(CheckpointRow.model_id == row.model_id)).first()
        if held is None:
            raise RequestError("duplicate of an earlier request whose checkpoint was deleted; send a new request")
        return path_of(held)
    taken = select(RequestRow.request_id).where(RequestRow.model_id == place.model_id)
    if session.get(ModelRow, place.model_id) is not None or session.exec(taken).first() is not None:
        raise RequestError(f"model_seq_id={place.model_seq_id} is in use in this session; use the next one")
    return None


def record(session: Session, kind: str, place: RunPosition, held: CheckpointRow, by: str) -> None:
    """Store the run and the name of a checkpoint that is on disk. Raises `RequestError` if the run's position was taken
    meanwhile.

    Args:
        session: Transaction to write in.
        kind: Kind of the request.
        place: Position of the new run.
        held: The checkpoint, which is not stored yet.
        by: Name of the caller, for the audit log.
    """
    earlier(session, place)
    if place.new_session:
        session.add(SessionRow(session_id=place.session_id, tenant=place.tenant, project_id=place.project_id))
    run = ModelRow(
        model_id=place.model_id,
        session_id=place.session_id,
        tenant=place.tenant,
        base_model=held.base_model,
        lora_config=held.lora_config,
        status="copy",
    )
    now = time.time()
    request = RequestRow(
        request_id=place.request_id,
        kind=kind,
        tenant=place.tenant,
        model_id=place.model_id,
        seq_id=0,
        decided=Decisions(saved_to=held.folder),
        body=b"",
        content_type=JSON,
        status="done",
        finished_at=now,
    )
    result = result_row(place.request_id, strict_json.dumps({"tinker_path": str(path_of(held))}), JSON, now)
    row = CheckpointRow(**held.model_dump())
    session.add_all([run, request, result, row])
    session.flush()
    note_checkpoint(session, "checkpoint_create", row, by)


def path_of(row: CheckpointRow) -> TinkerPath:
    """Path by which clients load the checkpoint."""
    return TinkerPath.parse("path", f"{ids.SCHEME}{row.model_id}/{row.kind}/{row.name}")
