"""Rows of named checkpoints: names, folders and expiry.

A folder name contains the seq_id of its save, so a save under a used name never changes files that may be in use. The
name's row is replaced by one with the new folder, and the old folder is removed when nothing refers to it.

A named checkpoint exists until it is deleted or expires. Samplers of an overwritten checkpoint continue to work.
Samplers of a deleted checkpoint end, and requests by its name fail.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sqlmodel import Session, col, select

from skyrl.errors import RequestError, UnknownName
from skyrl.tinker.database.database import Database
from skyrl.tinker.database.ledger.audit import note_checkpoint
from skyrl.tinker.database.tables import CheckpointRow, ModelRow, RequestRow, SamplerRow
from skyrl.tinker.identity import ids
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import CheckpointKind, TinkerPath
from skyrl.types import SaveOutput


class UnreferencedFiles(NamedTuple):
    """Files that no checkpoint name refers to. `version` is the version that they contain, or None."""

    version: str | None
    folder: str
    to_trash: bool = False
    """True if the files are kept in the trash for a while before they are removed."""


def find_checkpoint(session: Session, path: TinkerPath) -> CheckpointRow | None:
    """Return the checkpoint at a path, unless it has expired."""
    row = find_checkpoint_or_expired(session, path)
    return None if row is None or has_expired(row) else row


def find_checkpoint_or_expired(session: Session, path: TinkerPath) -> CheckpointRow | None:
    """Return the checkpoint at a path, even if it has expired. Its files may still exist."""
    kind = path.kind or "sampler_weights"
    query = select(CheckpointRow).where(
        CheckpointRow.model_id == path.model, CheckpointRow.kind == kind, CheckpointRow.name == path.name
    )
    return session.exec(query).first()


def has_expired(row: CheckpointRow) -> bool:
    return row.expires_at is not None and row.expires_at <= time.time()


def unknown_checkpoint(field: str, path: TinkerPath) -> UnknownName:
    return UnknownName(f"{field}={path}: there is no such checkpoint; use the `path` that a save returned")


SAVES = (
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "copy_weights",
    "external_weights_upload_finish",
)
"""Kinds of requests that create named checkpoints."""


@dataclass(frozen=True)
class SavedAs:
    """Name and attributes of a save. Raises `RequestError` for an invalid name."""

    model: ModelRow
    kind: CheckpointKind
    name: str
    seq_id: int
    overwrite: bool
    user_metadata: dict[str, str] | None
    ttl_seconds: int | None = None

    def __post_init__(self) -> None:
        ids.check_name("path", self.name)

    @property
    def path(self) -> TinkerPath:
        return TinkerPath(self.model.model_id, self.kind, self.name)

    @property
    def version(self) -> str:
        return ids.version_id(self.model.model_id, self.seq_id)

    @property
    def folder(self) -> str:
        return ids.folder(self.model.model_id, self.kind, f"{self.name}@{self.seq_id}")


async def refuse_taken_name(database: Database, saved: SavedAs) -> None:
    """Raise `RequestError` if a checkpoint of this name exists and the save may not replace it."""
    if not saved.overwrite:
        _refuse(saved, await database.read(lambda session: find_checkpoint(session, saved.path)))


def store_checkpoint(session: Session, saved: SavedAs, result: SaveOutput) -> UnreferencedFiles | None:
    """Store the row of a finished save.

    Returns the previous files of this name if no sampler uses them, or None.

    Raises `RequestError` if the name was taken during the save.
    """
    older = find_checkpoint_or_expired(session, saved.path)
    obsolete = None
    if older is not None and older.version == saved.version:
        return None  # row of this save, stored by a transaction whose outcome was not reported to us
    if older is not None:
        if not saved.overwrite and not has_expired(older):
            _refuse(saved, older)
        note_checkpoint(session, "checkpoint_delete", older, older.tenant, replaced=True)
        if session.exec(select(SamplerRow.sampler_id).where(SamplerRow.version == older.version)).first() is None:
            obsolete = UnreferencedFiles(older.version, older.folder)
        session.delete(older)
        session.flush()
    model = session.get(ModelRow, saved.model.model_id)
    assert model is not None
    row = CheckpointRow(
        model_id=model.model_id,
        kind=saved.kind,
        name=saved.name,
        tenant=model.tenant,
        version=saved.version,
        folder=saved.folder,
        base_model=model.base_model,
        lora_config=model.lora_config,
        user_metadata=saved.user_metadata,
        size_bytes=result.size_bytes,
        digest=result.digest,
        expires_at=expiry(saved.ttl_seconds),
    )
    session.add(row)
    note_checkpoint(session, "checkpoint_create", row, row.tenant)
    return obsolete


def expiry(ttl_seconds: int | None) -> float | None:
    """Return the Unix time at which a time to live ends if it starts now. None: never."""
    return None if ttl_seconds is None else time.time() + ttl_seconds


def own_checkpoint(session: Session, path: TinkerPath, caller: Caller) -> CheckpointRow:
    """Return the caller's checkpoint at a path, for a change. Raises `UnknownName` for other tenants' checkpoints, even
    for public ones."""
    row = find_checkpoint(session, path)
    if row is None or not caller.may_touch(row.tenant):
        raise unknown_checkpoint("path", path)
    return row


def was_saved(session: Session, path: TinkerPath, caller: Caller) -> bool:
    """Return True if the log has a save by the caller at this path. The checkpoint may have been deleted since."""
    query = select(col(RequestRow.tenant), col(RequestRow.decided)).where(
        RequestRow.model_id == path.model, RequestRow.status == "done", col(RequestRow.kind).in_(SAVES)
    )
    return any(
        caller.may_touch(tenant) and _is_for(Path(decided.saved_to or ""), path)
        for tenant, decided in session.exec(query).all()
    )


def _is_for(folder: Path, path: TinkerPath) -> bool:
    return folder.parent.name == (path.kind or "sampler_weights") and folder.name.rpartition("@")[0] == path.name


@dataclass(frozen=True)
class DeletedCheckpoint:
    """A checkpoint that was deleted."""

    files: UnreferencedFiles
    samplers: list[str]
    """Ids of the samplers that used the checkpoint."""


def delete_checkpoint(session: Session, row: CheckpointRow, by: str) -> DeletedCheckpoint:
    """Delete a checkpoint's row and end its samplers. The caller removes the files after the commit.

    Args:
        session: Transaction to write in.
        row: The checkpoint.
        by: Name of the caller.
    """
    note_checkpoint(session, "checkpoint_delete", row, by)
    samplers = session.exec(select(SamplerRow).where(SamplerRow.version == row.version)).all()
    for sampler in samplers:
        sampler.version = sampler.folder = None
    session.delete(row)
    return DeletedCheckpoint(UnreferencedFiles(row.version, row.folder), [sampler.sampler_id for sampler in samplers])


def _refuse(saved: SavedAs, older: CheckpointRow | None) -> None:
    if older is not None:
        raise RequestError(
            f"path={saved.name!r}: this model has a checkpoint {saved.path} already; choose another name, or send "
            "overwrite=true where the request has it"
        )
