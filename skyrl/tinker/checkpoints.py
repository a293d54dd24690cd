"""Named checkpoints: their names, folders and rows.

A folder carries the seq_id of its save beside the name, so saving under a used name never touches the files that may be
read meanwhile: the row moves to the new folder, and the old one goes when nothing refers to it.

A name and what it names live until the checkpoint is deleted or expires: who has a sampler of an overwritten checkpoint
goes on sampling it, but a deleted one ends, and its samplers fail by name.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from sqlmodel import Session, col, select

from skyrl.errors import RequestError
from skyrl.tinker import ids
from skyrl.tinker.admission import Obsolete
from skyrl.tinker.auth import BadKey, Caller
from skyrl.tinker.db import Database
from skyrl.tinker.directory import find_checkpoint, find_checkpoint_or_expired, has_expired, unknown_checkpoint
from skyrl.tinker.ids import CheckpointKind, TinkerPath
from skyrl.tinker.service import Service
from skyrl.tinker.tables import CheckpointRow, ModelRow, RequestRow, SamplerRow
from skyrl.types import SaveOutput

SAVED_TO = "saved_to"
"""In `RequestRow.decided`: folder of a named checkpoint. Once it is complete, its save is done."""
SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external", "copy_weights")
"""Kinds of requests that make named checkpoints."""


@dataclass(frozen=True)
class SavedAs:
    """What a save is to be known by. Raises `RequestError` for a bad name."""

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
    """Raise `RequestError` if there is a checkpoint of this name already, which the save may not replace."""
    if not saved.overwrite:
        _refuse(saved, await database.read(lambda session: find_checkpoint(session, saved.path)))


def store_checkpoint(session: Session, saved: SavedAs, result: SaveOutput) -> Obsolete | None:
    """Give a finished save its name. Returns the files that had it before, if no sampler uses them.

    Raises `RequestError` if the name was taken while it was being saved.
    """
    older = find_checkpoint_or_expired(session, saved.path)
    obsolete = None
    if older is not None and older.version == saved.version:
        return None  # this save's own, stored by a transaction whose end the database could not tell us
    if older is not None:
        if not saved.overwrite and not has_expired(older):
            _refuse(saved, older)
        if session.exec(select(SamplerRow.sampler_id).where(SamplerRow.version == older.version)).first() is None:
            obsolete = Obsolete(older.version, older.folder)
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
    return obsolete


def expiry(ttl_seconds: int | None) -> float | None:
    """When something that lives this long from now on expires."""
    return None if ttl_seconds is None else time.time() + ttl_seconds


def own_checkpoint(session: Session, path: TinkerPath, caller: Caller) -> CheckpointRow:
    """The checkpoint at a path, to be changed. Raises `UnknownName` for those of others, public ones too."""
    row = find_checkpoint(session, path)
    if row is None or not caller.may_touch(row.tenant):
        raise unknown_checkpoint("path", path)
    return row


def was_saved(session: Session, path: TinkerPath, caller: Caller) -> bool:
    """Whether the log has a save of the caller that made a checkpoint at a path, which may have gone since."""
    query = select(RequestRow.tenant, RequestRow.decided).where(
        RequestRow.model_id == path.model, RequestRow.status == "done", col(RequestRow.kind).in_(SAVES)
    )
    return any(
        caller.may_touch(tenant) and _is_for(Path(decided.get(SAVED_TO, "")), path)
        for tenant, decided in session.exec(query).all()
    )


def _is_for(folder: Path, path: TinkerPath) -> bool:
    return folder.parent.name == (path.kind or "sampler_weights") and folder.name.rpartition("@")[0] == path.name


@dataclass(frozen=True)
class Unnamed:
    """A checkpoint that is there no more."""

    files: Obsolete
    samplers: list[str]
    """Ids of those that sampled it."""


def unname(session: Session, row: CheckpointRow) -> Unnamed:
    """Take a checkpoint's name away and end its samplers. Its files are the caller's to remove, after the commit."""
    samplers = session.exec(select(SamplerRow).where(SamplerRow.version == row.version)).all()
    for sampler in samplers:
        sampler.version = sampler.folder = None
    session.delete(row)
    return Unnamed(Obsolete(row.version, row.folder), [sampler.sampler_id for sampler in samplers])


async def readable_checkpoint(
    service: Service, field: str, path: TinkerPath, caller: Caller, access_token: str | None = None
) -> CheckpointRow:
    """The checkpoint at a path, if the caller may read it, or whoever `access_token` (a key or token) belongs to.

    Raises `RequestError` if not.
    """
    if access_token is None:
        return await service.directory.checkpoint(field, path, caller)
    try:
        other = service.keys.caller(access_token)
    except BadKey as error:
        raise RequestError(
            "weights_access_token is not a key of this server; send the key of the account that owns the checkpoint, "
            "or leave it out"
        ) from error
    return await service.directory.checkpoint(field, path, caller, other)


async def training_checkpoint(
    service: Service, path: TinkerPath, caller: Caller, access_token: str | None = None
) -> CheckpointRow:
    """The checkpoint at a path, if training can go on from it. Raises `RequestError` if not."""
    if path.kind not in ("weights", None):
        raise RequestError(
            f"path={path} holds {path.kind}, which have no optimizer state; load a checkpoint that save_weights "
            "(save_state) made: tinker://MODEL/weights/NAME"
        )
    if path.kind is None:
        path = TinkerPath(path.model, "weights", path.name)
    row = await readable_checkpoint(service, "path", path, caller, access_token)
    if row.base_model != service.info.base_model:
        raise RequestError(
            f"path={path} was trained on base model {row.base_model!r}, which is not the one served here "
            f"({service.info.base_model!r}); start the server with --base-model {row.base_model}"
        )
    return row


def _refuse(saved: SavedAs, older: CheckpointRow | None) -> None:
    if older is not None:
        raise RequestError(
            f"path={saved.name!r}: this model has a checkpoint {saved.path} already; choose another name, or send "
            "overwrite=true where the request has it"
        )
