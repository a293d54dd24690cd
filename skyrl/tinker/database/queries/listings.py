"""Listings of the runs, checkpoints and sessions that the caller may see, newest first.

All functions only read (jobs for `Database.read`).
"""

import time
from collections.abc import Sequence
from typing import Any, Literal

from sqlalchemy import ColumnElement, and_, func, or_, true
from sqlmodel import Session, col, select

from skyrl.errors import UnknownName
from skyrl.tinker.database.tables import CheckpointRow, ModelRow, SamplerRow, SessionRow
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import SCHEME
from skyrl.tinker.wire import management_schemas as rest
from skyrl.types import LoraConfig, version_hash

Scope = Literal["owned", "accessible"]
"""Scope of a list: the caller's own objects, or also public objects of others."""


def checkpoints(session: Session, caller: Caller, limit: int, offset: int) -> rest.CheckpointsListResponse:
    """Return a page of the caller's checkpoints."""
    mine = own_checkpoints(caller)
    total = session.exec(select(func.count()).select_from(CheckpointRow).where(mine)).one()
    page = select(CheckpointRow).where(mine).order_by(*newest_first()).limit(limit).offset(offset)
    cursor = rest.Cursor(offset=offset, limit=limit, total_count=total)
    return rest.CheckpointsListResponse(checkpoints=[checkpoint(row) for row in session.exec(page)], cursor=cursor)


def checkpoints_of_run(session: Session, caller: Caller, run_id: str) -> rest.CheckpointsListResponse:
    """Return all checkpoints of a run, or only public ones if the run is another tenant's. Raises `UnknownName`."""
    _run(session, caller, "accessible", run_id)
    rows = session.exec(
        select(CheckpointRow).where(readable(caller), CheckpointRow.model_id == run_id).order_by(*newest_first())
    )
    return rest.CheckpointsListResponse(checkpoints=[checkpoint(row) for row in rows])


def checkpoint(row: CheckpointRow) -> rest.Checkpoint:
    """Convert a checkpoint to the form of the API."""
    checkpoint_id = f"{row.kind}/{row.name}"
    return rest.Checkpoint(
        checkpoint_id=checkpoint_id,
        checkpoint_type=rest.CHECKPOINT_TYPES[row.kind],
        time=rest.moment(row.created_at),
        tinker_path=f"{SCHEME}{row.model_id}/{checkpoint_id}",
        base_model=row.base_model,
        size_bytes=row.size_bytes,
        public=row.public,
        user_metadata=row.user_metadata,
        expires_at=None if row.expires_at is None else rest.moment(row.expires_at),
        version_hash=version_hash(row.version),
    )


def training_runs(
    session: Session, caller: Caller, scope: Scope, project_id: str | None, limit: int, offset: int
) -> rest.TrainingRunsResponse:
    """Return a page of the runs that a caller may see."""
    seen = [_visible_run(caller, scope), col(ModelRow.status) != "failed"]
    if project_id is not None:
        seen.append(
            col(ModelRow.session_id).in_(select(SessionRow.session_id).where(SessionRow.project_id == project_id))
        )
    total = session.exec(select(func.count()).select_from(ModelRow).where(*seen)).one()
    newest = col(ModelRow.created_at).desc(), col(ModelRow.model_id).desc()
    rows = session.exec(select(ModelRow).where(*seen).order_by(*newest).limit(limit).offset(offset)).all()
    cursor = rest.Cursor(offset=offset, limit=limit, total_count=total)
    return rest.TrainingRunsResponse(training_runs=_described(session, caller, rows), cursor=cursor)


def training_run(session: Session, caller: Caller, scope: Scope, run_id: str) -> rest.TrainingRun:
    """Return a run. Raises `UnknownName`."""
    return _described(session, caller, [_run(session, caller, scope, run_id)])[0]


def sessions(session: Session, caller: Caller, limit: int, offset: int) -> rest.ListSessionsResponse:
    """Return a page of the caller's sessions."""
    newest = col(SessionRow.created_at).desc(), col(SessionRow.session_id).desc()
    mine = select(SessionRow.session_id).where(_owned(SessionRow.tenant, caller))
    return rest.ListSessionsResponse(sessions=list(session.exec(mine.order_by(*newest).limit(limit).offset(offset))))


def session_contents(session: Session, row: SessionRow) -> rest.GetSessionResponse:
    """Return the runs and samplers of a session, in order of creation."""
    runs = select(ModelRow.model_id).where(ModelRow.session_id == row.session_id, ModelRow.status != "failed")
    samplers = select(SamplerRow.sampler_id).where(SamplerRow.session_id == row.session_id)
    return rest.GetSessionResponse(
        training_run_ids=list(session.exec(runs.order_by(col(ModelRow.created_at), col(ModelRow.model_id)))),
        sampler_ids=list(session.exec(samplers.order_by(col(SamplerRow.created_at), col(SamplerRow.sampler_id)))),
        user_metadata=rest.texts(row.user_metadata),
        display_name=row.display_name,
    )


def _run(session: Session, caller: Caller, scope: Scope, run_id: str) -> ModelRow:
    seen = select(ModelRow).where(ModelRow.model_id == run_id, _visible_run(caller, scope))
    row = session.exec(seen).first()
    if row is None or row.status == "failed":
        raise UnknownName(f"training run {run_id[:300]!r} is not known; training_runs lists yours")
    return row


def _described(session: Session, caller: Caller, models: Sequence[ModelRow]) -> list[rest.TrainingRun]:
    newest = _newest_checkpoints(session, caller, [model.model_id for model in models])
    return [_training_run(model, caller, newest) for model in models]


def _training_run(model: ModelRow, caller: Caller, newest: dict[tuple[str, str], rest.Checkpoint]) -> rest.TrainingRun:
    rank = LoraConfig(**model.lora_config).rank
    return rest.TrainingRun(
        training_run_id=model.model_id,
        base_model=model.base_model,
        model_owner=_owner(model.tenant, caller),
        corrupted=model.status == "lost",
        is_lora=rank > 0,
        lora_rank=rank,
        last_request_time=rest.moment(model.last_request_at or model.created_at),
        last_checkpoint=newest.get((model.model_id, "weights")),
        last_sampler_checkpoint=newest.get((model.model_id, "sampler_weights")),
        user_metadata=rest.texts(model.user_metadata) if caller.may_touch(model.tenant) else None,
    )


def _newest_checkpoints(
    session: Session, caller: Caller, model_ids: Sequence[str]
) -> dict[tuple[str, str], rest.Checkpoint]:
    """Return the newest checkpoint by (model, kind)."""
    newest = (
        select(func.max(CheckpointRow.id))
        .where(readable(caller), col(CheckpointRow.model_id).in_(model_ids))
        .group_by(col(CheckpointRow.model_id), col(CheckpointRow.kind))
    )
    rows = session.exec(select(CheckpointRow).where(col(CheckpointRow.id).in_(newest)))
    return {(row.model_id, row.kind): checkpoint(row) for row in rows}


def _owner(tenant: str, caller: Caller) -> str:
    """Return the name of an object's owner. Other callers do not see it, because a tenant's id is a hash of its key."""
    return caller.urn if caller.may_touch(tenant) else "skyrl:user:another"


def _owned(tenant: Any, caller: Caller) -> ColumnElement[bool]:
    return true() if caller.tenant is None else col(tenant) == caller.tenant


def unexpired() -> ColumnElement[bool]:
    """Condition for checkpoints that have not expired."""
    return or_(col(CheckpointRow.expires_at).is_(None), col(CheckpointRow.expires_at) > time.time())


def own_checkpoints(caller: Caller) -> ColumnElement[bool]:
    """Condition for the caller's checkpoints."""
    return and_(_owned(CheckpointRow.tenant, caller), unexpired())


def readable(caller: Caller) -> ColumnElement[bool]:
    """Condition for the caller's checkpoints and public ones."""
    return and_(unexpired(), or_(_owned(CheckpointRow.tenant, caller), col(CheckpointRow.public)))


def _visible_run(caller: Caller, scope: Scope) -> ColumnElement[bool]:
    if scope == "owned":
        return _owned(ModelRow.tenant, caller)
    shared = select(CheckpointRow.model_id).where(unexpired(), col(CheckpointRow.public))
    return or_(_owned(ModelRow.tenant, caller), col(ModelRow.model_id).in_(shared))


def newest_first() -> tuple[Any, Any]:
    """Order of checkpoints in lists."""
    return col(CheckpointRow.created_at).desc(), col(CheckpointRow.id).desc()
