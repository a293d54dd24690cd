"""Retention jobs. Each job deletes expired rows and returns the files that have to be deleted with them.

Jobs run in the database's writer. Full scans run in a reader first (`TableSweep`), so that they do not block writes.
Rows are deleted first, and files after the commit. A kill in between leaves unreferenced files, which `orphans` finds,
but never a row without files. A dry run executes the same jobs and rolls them back. Data that the revival of a model
needs is kept regardless of its age.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, and_, delete, func, literal_column, or_, update
from sqlalchemy.orm import aliased
from sqlmodel import Session, col, select

from skyrl.errors import StorageError
from skyrl.tinker.checkpoints.disk_budget import DEPTH, KINDS, folders_of_kinds
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.database.ledger.audit import SERVER
from skyrl.tinker.database.log.replay_log import folders_to_load, release
from skyrl.tinker.database.queries.capture_rows import remove_captures
from skyrl.tinker.database.queries.checkpoint_rows import UnreferencedFiles, delete_checkpoint
from skyrl.tinker.database.tables import (
    DONE,
    WITH_BODY,
    CaptureRow,
    CheckpointRow,
    CustomLossRow,
    ModelRow,
    RequestRow,
    ResultRow,
    SamplerRow,
    SessionRow,
    VersionRow,
)
from skyrl.tinker.identity.ids import NAMED, folder_of_model
from skyrl.utils.files.atomic_folders import QUARANTINED, TEMPORARY
from skyrl.utils.files.stored_folders import BucketFolder, folders_below, stored_bytes

log = logging.getLogger(__name__)

Found = TypeVar("Found")

DAY_S = 24 * 3600
ENDED_AFTER_S = DAY_S
"""Seconds of silence after which a session counts as ended."""
HEARD_WITHIN_S = 3600
"""Minimum seconds after startup before a session can count as silent. Clients send a heartbeat every 10 seconds."""
RESULT_AGE_S = 600
"""Minimum lifetime of a result in seconds, even if the results exceed `max_results_gib`."""
NOT_SERVED_S = 3600
"""Seconds from which a captured session is served no more until it is removed."""
ORPHAN_AGE_S = 3600
QUARANTINE_S = 7 * DAY_S
FOLDERS = 10
"""Maximum number of saved folders whose rows one transaction deletes. If a kill leaves that many folders unreferenced,
`guard` still allows their removal."""
BATCH = 200
"""Maximum number of rows that one transaction deletes, so that other writes are not delayed."""
MANY_SAMPLERS = 1000
"""Maximum number of samplers of one session that one transaction deletes. More samplers need more transactions."""
BATCH_BYTES = 64 * 2**20
"""Maximum bytes of results or bodies that one transaction deletes, unless a single one is larger."""
GONE = ("failed", "copy", "expired")
"""Statuses of models that are never revived. An unloaded model may be revived to write a published version; a lost
model may become available again (`request_log.try_lost_models_again`)."""
NOT_BROUGHT_BACK = (*GONE, "unloaded")


@dataclass(frozen=True)
class Rules:
    """Inputs of the retention jobs."""

    config: EngineConfig
    heard_since: float = 0.0
    """Unix time since which heartbeats could arrive: the start of the server, or the end of a suspension."""
    surplus_since: float = 0.0
    """Creation time from which checkpoints can count as surplus."""
    sampled: Mapping[str, float] | None = None
    """Time of the last sample of each version since `heard_since`. None if unknown."""
    results_since: float = 0.0
    """Results that finished before this time do not fit into the size limit (`oldest_result`)."""


@dataclass(frozen=True)
class Removal:
    """Something that was removed from the database, and the files that have to be deleted with it."""

    what: str
    size_bytes: int = 0
    files: UnreferencedFiles | None = None
    changed: tuple[str, ...] = ()
    """Ids of changed and deleted rows."""


@dataclass(frozen=True)
class TableSweep(Generic[Found]):
    """A job that scans a table: a reader finds candidates, and the writer checks them again and removes them."""

    find: Callable[[Session, Rules, float], Sequence[Found]]
    remove: Callable[[Session, Rules, float, Sequence[Found]], list[Removal]]

    def __call__(self, session: Session, rules: Rules, now: float) -> list[Removal]:
        """Find and remove in one transaction."""
        found = self.find(session, rules, now)
        return self.remove(session, rules, now, found) if found else []


def results(session: Session, rules: Rules, now: float) -> list[Removal]:
    """Delete results that ended long ago or exceed the size limit. The request row stays, to detect duplicates."""
    since = max(now - rules.config.result_retention_sec, min(rules.results_since, now - RESULT_AGE_S))
    oldest = select(ResultRow.request_id, ResultRow.size_bytes).where(col(ResultRow.finished_at) < since)
    found = session.exec(oldest.order_by(col(ResultRow.finished_at)).limit(BATCH)).all()
    ids, total = _up_to_batch_bytes(found)
    if ids:
        session.execute(delete(ResultRow).where(col(ResultRow.request_id).in_(ids)))
    return [Removal(f"{len(ids)} results of old requests", total)] if ids else []


def old_captures(session: Session, rules: Rules, now: float) -> list[Removal]:
    """Delete captured sessions that were used long ago. They are not served before that, so nobody uses them now."""
    before = now - rules.config.result_retention_sec - NOT_SERVED_S
    found = session.exec(select(col(CaptureRow.id)).where(CaptureRow.used_at < before).limit(FOLDERS)).all()
    if found:
        remove_captures(session, found)
    return [Removal(f"{len(found)} old captured sessions")] if found else []


def oldest_result(session: Session, max_bytes: float) -> float:
    """Return the time since which finished results fit into `max_bytes`. 0.0 if all fit, or if `max_bytes` is 0."""
    size = col(ResultRow.size_bytes)
    if max_bytes == 0 or (session.exec(select(func.sum(size))).one() or 0) <= max_bytes:
        return 0.0
    newest_first = col(ResultRow.finished_at).desc()
    taken = select(ResultRow.finished_at, func.sum(size).over(order_by=newest_first).label("taken")).subquery()
    last = session.exec(select(func.max(taken.c.finished_at)).where(taken.c.taken > max_bytes)).one()
    return math.nextafter(last, math.inf)


def _unneeded_bodies() -> Any:
    """Select (request id, bytes) of bodies that no revival replays.

    These are bodies of finished requests that failed, are part of a snapshot, or belong to a model in `GONE`.
    """
    covered = select(ModelRow.model_id).where(
        ModelRow.model_id == RequestRow.model_id,
        col(ModelRow.status).not_in(GONE),
        or_(col(ModelRow.snapshot_seq_id).is_(None), col(ModelRow.snapshot_seq_id) < col(RequestRow.seq_id)),
    )
    unneeded = and_(
        literal_column(WITH_BODY),
        col(RequestRow.status) != "pending",
        or_(and_(col(RequestRow.status) == "failed", col(RequestRow.gradients) != DONE), ~covered.exists()),
    )
    return select(RequestRow.request_id, func.length(RequestRow.body)).where(unneeded)


def _find_bodies(session: Session, rules: Rules, now: float) -> list[str]:
    return [request_id for request_id, _ in session.exec(_unneeded_bodies().limit(BATCH))]


def _empty_bodies(session: Session, rules: Rules, now: float, found: Sequence[str]) -> list[Removal]:
    ids, total = _up_to_batch_bytes(session.exec(_unneeded_bodies().where(col(RequestRow.request_id).in_(found))))
    session.execute(update(RequestRow).where(col(RequestRow.request_id).in_(ids)).values(body=b""))
    return [Removal(f"{len(ids)} bodies of finished requests", total)] if ids else []


bodies = TableSweep(_find_bodies, _empty_bodies)


def _up_to_batch_bytes(sized: Iterable[tuple[str, int]]) -> tuple[list[str], int]:
    """Return the ids to delete in one transaction, and their total bytes."""
    ids, total = [], 0
    for request_id, size in sized:
        if not ids or total + size <= BATCH_BYTES:
            ids.append(request_id)
            total += size
    return ids, total


def _find_expired(session: Session, rules: Rules, now: float) -> Sequence[int | None]:
    over = select(CheckpointRow.id, CheckpointRow.folder).where(col(CheckpointRow.expires_at) <= now)
    found = session.exec(over.order_by(col(CheckpointRow.expires_at))).all()
    needed = folders_to_load(session) if found else set()
    return [row_id for row_id, folder in found if folder not in needed][:FOLDERS]


def _remove_expired(session: Session, rules: Rules, now: float, found: Sequence[int | None]) -> list[Removal]:
    over = select(CheckpointRow).where(col(CheckpointRow.id).in_(found), col(CheckpointRow.expires_at) <= now)
    return _unnamed(session, rules, session.exec(over).all(), "expired checkpoint")


expired_checkpoints = TableSweep(_find_expired, _remove_expired)
"""Removes checkpoints whose time to live has passed."""


def _crowded(session: Session, rules: Rules, now: float) -> Sequence[tuple[str, str]]:
    """Return each (model, kind) that has more than `keep_last_checkpoints` private ones. Empty if the option is 0."""
    keep = rules.config.keep_last_checkpoints
    groups = select(CheckpointRow.model_id, CheckpointRow.kind).where(col(CheckpointRow.public).is_(False))
    groups = groups.group_by(CheckpointRow.model_id, CheckpointRow.kind).having(func.count() > keep)
    return session.exec(groups).all() if keep else []


def _beyond(session: Session, rules: Rules, crowded: Sequence[tuple[str, str]]) -> list[CheckpointRow]:
    found: list[CheckpointRow] = []
    for model_id, kind in crowded:
        mine = select(CheckpointRow).where(CheckpointRow.model_id == model_id, CheckpointRow.kind == kind)
        newest_first = mine.order_by(col(CheckpointRow.created_at).desc(), col(CheckpointRow.id).desc())
        private = newest_first.where(col(CheckpointRow.public).is_(False))
        found += session.exec(private.offset(rules.config.keep_last_checkpoints)).all()
    return [row for row in found if row.created_at >= rules.surplus_since]


def surplus(session: Session, rules: Rules) -> list[CheckpointRow]:
    """Return the checkpoints beyond `keep_last_checkpoints`."""
    return _beyond(session, rules, _crowded(session, rules, 0.0))


def _find_surplus(session: Session, rules: Rules, now: float) -> Sequence[tuple[str, str]]:
    """Return up to `FOLDERS` pairs (model, kind) with removable checkpoints."""
    crowded = _crowded(session, rules, now)
    needed = folders_to_load(session) if crowded else set()
    may_go = (group for group in crowded if any(row.folder not in needed for row in _beyond(session, rules, [group])))
    return list(islice(may_go, FOLDERS))


def _remove_surplus(session: Session, rules: Rules, now: float, crowded: Sequence[tuple[str, str]]) -> list[Removal]:
    what = f"checkpoint beyond the newest {rules.config.keep_last_checkpoints}"
    return _unnamed(session, rules, _beyond(session, rules, crowded), what)


surplus_checkpoints = TableSweep(_find_surplus, _remove_surplus)
"""Removes private checkpoints beyond the newest `keep_last_checkpoints` of a model and kind. Public ones do not count.
"""


def _unnamed(session: Session, rules: Rules, rows: Any, what: str) -> list[Removal]:
    needed = folders_to_load(session) if rows else set()
    removals = []
    for row in rows:
        if row.folder not in needed and len(removals) < FOLDERS:
            path = f"tinker://{row.model_id}/{row.kind}/{row.name}"
            gone = delete_checkpoint(session, row, SERVER)
            files = gone.files._replace(to_trash=rules.config.trash_retention_sec > 0)
            removals.append(Removal(f"{what} {path}", row.size_bytes or 0, files, tuple(gone.samplers)))
    return removals


def _ended_versions(rules: Rules, now: float) -> Any:
    """Select unnamed versions of ended sessions, and inflight versions that a newer one has replaced."""
    over = _ended(rules, now, rules.config.ephemeral_grace_sec)
    sampled_on = select(SamplerRow.sampler_id).where(SamplerRow.version == VersionRow.version)
    elsewhere = sampled_on.where(col(SamplerRow.session_id).not_in(over))
    current = select(ModelRow.model_id).where(ModelRow.inflight_version == VersionRow.version)
    ended = and_(col(VersionRow.session_id).in_(over), ~elsewhere.exists())
    replaced = and_(~sampled_on.exists(), ~current.exists())
    # A version that is being written would be written again; it is removed once it is on disk, or a day old.
    settled = or_(col(VersionRow.digest).is_not(None), col(VersionRow.created_at) < now - DAY_S)
    return select(VersionRow).where(settled, or_(ended, replaced))


def _find_ended_versions(session: Session, rules: Rules, now: float) -> list[str]:
    rows = session.exec(_ended_versions(rules, now)).all()
    return [row.version for row in rows if not _is_pending(session, row)][:BATCH]


def _forget_ended_versions(session: Session, rules: Rules, now: float, found: Sequence[str]) -> list[Removal]:
    removals = []
    for row in session.exec(_ended_versions(rules, now).where(col(VersionRow.version).in_(found))).all():
        if not _is_pending(session, row):
            removals.append(forget_version(session, row.version, row.folder, row.size_bytes or 0))
            session.delete(row)
    return removals


ended_versions = TableSweep(_find_ended_versions, _forget_ended_versions)


def _overwritten(rules: Rules, now: float) -> Any:
    """Select (version, folder) of overwritten checkpoints that only samplers of ended sessions use."""
    over = _ended(rules, now, rules.config.ephemeral_grace_sec)
    named = select(CheckpointRow.id).where(CheckpointRow.version == SamplerRow.version)
    other = aliased(SamplerRow)
    running = select(other.sampler_id).where(other.version == SamplerRow.version, col(other.session_id).not_in(over))
    return select(SamplerRow.version, SamplerRow.folder).where(
        SamplerRow.kind == "checkpoint",
        col(SamplerRow.version).is_not(None),
        ~named.exists(),
        ~running.correlate(SamplerRow).exists(),
    )


def _find_overwritten(session: Session, rules: Rules, now: float) -> list[str]:
    found = set(session.exec(_overwritten(rules, now)).all())
    needed = folders_to_load(session) if found else set()
    return [version for version, folder in found if folder and folder not in needed][:FOLDERS]


def _forget_overwritten(session: Session, rules: Rules, now: float, found: Sequence[str]) -> list[Removal]:
    still = set(session.exec(_overwritten(rules, now).where(col(SamplerRow.version).in_(found))).all())
    needed = folders_to_load(session)
    return [forget_version(session, version, folder, 0) for version, folder in still if folder not in needed]


overwritten_checkpoints = TableSweep(_find_overwritten, _forget_overwritten)


def older_versions(session: Session, rules: Rules, now: float) -> list[Removal]:
    """Remove versions that have no row, but that samplers and models of ended sessions name.

    Such versions were written by an earlier version of the server, which had no rows of versions.
    """
    over = _ended(rules, now, rules.config.ephemeral_grace_sec)
    known = select(VersionRow.version)
    samplers = select(SamplerRow.version, SamplerRow.folder).where(
        SamplerRow.kind == "snapshot", col(SamplerRow.session_id).in_(over), col(SamplerRow.version).not_in(known)
    )
    models = select(ModelRow.inflight_version, ModelRow.inflight_folder).where(
        col(ModelRow.session_id).in_(over), col(ModelRow.inflight_version).not_in(known)
    )
    found = {*session.exec(samplers).all(), *session.exec(models).all()}
    return [forget_version(session, version, folder, 0) for version, folder in found if version and folder]


def forget_version(
    session: Session, version: str, folder: str, size_bytes: int, removed_by: str | None = None
) -> Removal:
    """Clear a version from all samplers and models that name it.

    `removed_by` has the option and value of the limit that the version exceeds, for the errors of its samplers. None:
    the version is removed for another reason.
    """
    samplers = session.exec(select(SamplerRow).where(SamplerRow.version == version)).all()
    models = session.exec(select(ModelRow).where(ModelRow.inflight_version == version)).all()
    for sampler in samplers:
        sampler.version = sampler.folder = None
        sampler.removed_by = removed_by
    for model in models:
        model.inflight_version = model.inflight_folder = None
    changed = (*(sampler.sampler_id for sampler in samplers), *(model.model_id for model in models))
    why = f" beyond {removed_by}" if removed_by else ""
    return Removal(f"version {version}{why}", size_bytes, UnreferencedFiles(version, folder), changed)


def _is_pending(session: Session, row: VersionRow) -> bool:
    """Return True if the request that publishes a version is pending."""
    seq_id = int(row.version.rpartition("@")[2])
    query = select(RequestRow.status).where(RequestRow.model_id == row.model_id, RequestRow.seq_id == seq_id)
    return session.exec(query).first() == "pending"


def _ended_models(rules: Rules, now: float) -> Any:
    """Select models that will not be used again and that still have revival data: a snapshot or logged bodies."""
    waiting = select(RequestRow.request_id).where(
        RequestRow.model_id == ModelRow.model_id, RequestRow.status == "pending"
    )
    finished = select(SessionRow.session_id).where(col(SessionRow.finished_at) < now - rules.config.ephemeral_grace_sec)
    silent = _ended(rules, now, rules.config.session_retention_sec)
    ended = or_(col(ModelRow.session_id).in_(finished), col(ModelRow.session_id).in_(silent))
    kept = or_(col(ModelRow.snapshot_folder).is_not(None), col(ModelRow.status).not_in(NOT_BROUGHT_BACK))
    over = or_(col(ModelRow.status).in_(GONE), and_(or_(col(ModelRow.status) == "unloaded", ended), ~_unwritten()))
    return select(ModelRow).where(kept, over, ~waiting.exists())


def _find_ended_models(session: Session, rules: Rules, now: float) -> list[str]:
    return [row.model_id for row in session.exec(_ended_models(rules, now).limit(FOLDERS))]


def _forget_snapshots(session: Session, rules: Rules, now: float, found: Sequence[str]) -> list[Removal]:
    """Delete the revival data of models. Their status becomes "unloaded" (finished session) or "expired" (silent)."""
    removals = []
    for row in session.exec(_ended_models(rules, now).where(col(ModelRow.model_id).in_(found))).all():
        if row.snapshot_folder is not None:
            removals.append(_snapshot_removal(row))
        else:
            removals.append(Removal(f"requests to repeat for model {row.model_id}", changed=(row.model_id,)))
        release(session, row.model_id)
        if row.status not in NOT_BROUGHT_BACK:
            was_finished = session.get_one(SessionRow, row.session_id).finished_at is not None
            row.status = "unloaded" if was_finished else "expired"
    return removals


snapshots = TableSweep(_find_ended_models, _forget_snapshots)


def _unwritten() -> ColumnElement[bool]:
    """Build the condition that a model has a published version that is not on disk."""
    versions = select(VersionRow.version).where(
        VersionRow.model_id == ModelRow.model_id, col(VersionRow.digest).is_(None)
    )
    return versions.exists()


def _snapshot_removal(row: ModelRow) -> Removal:
    assert row.snapshot_folder is not None
    files = UnreferencedFiles(f"{row.model_id}@snapshot", row.snapshot_folder)
    return Removal(f"snapshot of model {row.model_id}", row.snapshot_bytes or 0, files, (row.model_id,))


def old_requests(session: Session, rules: Rules, now: float) -> list[Removal]:
    """Delete log entries of models that can no longer be revived and whose session ended long ago."""
    models = select(ModelRow.model_id).where(
        col(ModelRow.session_id).in_(_ended(rules, now, rules.config.session_retention_sec)),
        col(ModelRow.status).in_(NOT_BROUGHT_BACK),
        ~_unwritten(),
    )
    old = select(RequestRow.request_id).where(col(RequestRow.model_id).in_(models), col(RequestRow.status) != "pending")
    found = session.exec(old.limit(BATCH)).all()
    for table in (ResultRow, RequestRow) if found else ():
        session.execute(delete(table).where(col(table.request_id).in_(found)))
    return [Removal(f"{len(found)} requests of ended sessions")] if found else []


def old_losses(session: Session, rules: Rules, now: float) -> list[Removal]:
    """Delete custom losses of sessions that ended long ago.

    Losses are kept while the session has a model that may be revived, or a logged request.
    """
    logged = select(RequestRow.request_id).where(RequestRow.model_id == ModelRow.model_id)
    needing = select(ModelRow.model_id).where(
        ModelRow.session_id == CustomLossRow.session_id,
        or_(col(ModelRow.status).not_in(NOT_BROUGHT_BACK), _unwritten(), logged.exists()),
    )
    over = _ended(rules, now, rules.config.session_retention_sec)
    old = select(CustomLossRow.loss_id).where(col(CustomLossRow.session_id).in_(over), ~needing.exists())
    found = session.exec(old.limit(BATCH)).all()
    if found:
        session.execute(delete(CustomLossRow).where(col(CustomLossRow.loss_id).in_(found)))
    return [Removal(f"{len(found)} custom losses of ended sessions", changed=tuple(found))] if found else []


def old_sessions(session: Session, rules: Rules, now: float) -> list[Removal]:
    """Delete all rows of sessions that ended long ago and have neither checkpoints nor versions left."""
    saved = (
        select(CheckpointRow.id)
        .join(ModelRow, col(ModelRow.model_id) == col(CheckpointRow.model_id))
        .where(ModelRow.session_id == SessionRow.session_id)
    )
    versions = select(VersionRow.version).where(VersionRow.session_id == SessionRow.session_id)
    over = col(SessionRow.session_id).in_(_ended(rules, now, rules.config.session_retention_sec))
    removals = []
    for row in session.exec(select(SessionRow).where(over, ~saved.exists(), ~versions.exists()).limit(BATCH)).all():
        models = session.exec(select(ModelRow).where(ModelRow.session_id == row.session_id)).all()
        ids = [model.model_id for model in models]
        theirs = select(RequestRow.request_id).where(col(RequestRow.model_id).in_(ids))
        session.execute(delete(ResultRow).where(col(ResultRow.request_id).in_(theirs)))
        session.execute(delete(RequestRow).where(col(RequestRow.model_id).in_(ids)))
        session.execute(delete(CustomLossRow).where(col(CustomLossRow.session_id) == row.session_id))
        mine = select(SamplerRow).where(SamplerRow.session_id == row.session_id)
        samplers = session.exec(mine.limit(MANY_SAMPLERS)).all()
        if len(samplers) == MANY_SAMPLERS:
            for sampler in samplers:
                session.delete(sampler)
            changed = tuple(sampler.sampler_id for sampler in samplers)
            return [*removals, Removal(f"{len(samplers)} samplers of session {row.session_id}", changed=changed)]
        for gone in (*samplers, *models, row):
            session.delete(gone)
        changed = (row.session_id, *ids, *(sampler.sampler_id for sampler in samplers))
        removals.append(Removal(f"session {row.session_id} with {len(models)} models", changed=changed))
        removals += [_snapshot_removal(model) for model in models if model.snapshot_folder is not None]
    return removals


OFTEN = (
    results,
    old_captures,
    bodies,
    expired_checkpoints,
    surplus_checkpoints,
    overwritten_checkpoints,
    ended_versions,
    older_versions,
)
SELDOM = (snapshots, old_requests, old_losses, old_sessions)
"""`OFTEN`: jobs of every round. `SELDOM`: jobs of full rounds, as they scan more than they remove."""


def _ended(rules: Rules, now: float, for_s: float) -> Any:
    """Select ids of sessions that ended more than `for_s` seconds ago.

    A session ends when its client finishes it, or after `ENDED_AFTER_S` of silence.
    """
    heard = col(SessionRow.last_seen_at)
    conditions = [col(SessionRow.finished_at) < now - for_s]
    if rules.heard_since < now - HEARD_WITHIN_S:
        conditions.append(and_(col(SessionRow.finished_at).is_(None), heard < now - for_s - ENDED_AFTER_S))
    return select(SessionRow.session_id).where(or_(*conditions))


def named_folders(session: Session) -> set[str]:
    """Return all folders that rows reference or revivals need."""
    columns = (
        CheckpointRow.folder,
        VersionRow.folder,
        SamplerRow.folder,
        ModelRow.snapshot_folder,
        ModelRow.inflight_folder,
    )
    named = {folder for column in columns for folder in session.exec(select(column)).all() if folder}
    return named | folders_to_load(session)


def busy_models(session: Session) -> set[str]:
    """Return the models with pending requests. Folders of these models may still get a row."""
    return set(session.exec(select(RequestRow.model_id).where(RequestRow.status == "pending").distinct()).all())


def old_folders(config: EngineConfig, now: float) -> Iterator[str]:
    """Yield MODEL/KIND/NAME of folders old enough to be removed if unreferenced.

    The minimum age is `ORPHAN_AGE_S`, and `QUARANTINE_S` for damaged folders. If the bucket fails, its folders are
    skipped.
    """
    base = config.checkpoints_folder
    for kind in folders_of_kinds(base):
        for path in kind.iterdir() if kind.name in KINDS else ():
            age = QUARANTINE_S if path.suffix == QUARANTINED else ORPHAN_AGE_S
            hidden = path.name.startswith(".") and path.suffix not in (QUARANTINED, TEMPORARY)
            if not hidden and path.is_dir() and now - _changed_at(path) >= age:
                yield str(path.relative_to(base))
    kinds = NAMED if config.snapshots_bucket is None else KINDS
    for name, kept in _remote_folders(config).items():
        if name.split("/")[1] in kinds and now - kept.modified >= ORPHAN_AGE_S:
            yield name


def _remote_folders(config: EngineConfig) -> Mapping[str, BucketFolder]:
    try:
        return {} if config.checkpoints_bucket is None else folders_below(config.checkpoints_bucket, DEPTH)
    except StorageError as error:
        log.warning("%s", error)
        return {}


def orphans(config: EngineConfig, folders: Iterable[str], named: set[str], busy: set[str]) -> list[Removal]:
    """List removals of unreferenced folders: leftovers of crashes, replaced snapshots, damaged folders.

    Args:
        config: Configuration of the trash.
        folders: Result of `old_folders`.
        named: Result of `named_folders`.
        busy: Result of `busy_models`.
    """
    skipped = {folder_of_model(model_id) for model_id in busy}
    removals = []
    for name in folders:
        path = Path(name)
        if name not in named and path.parent.parent.name not in skipped:
            what = "damaged folder" if path.suffix == QUARANTINED else "folder without a name"
            to_trash = config.trash_retention_sec > 0 and not path.name.startswith(".")
            removals.append(Removal(f"{what} {name}", files=UnreferencedFiles(name, name, to_trash)))
    return removals


def measured(removal: Removal, config: EngineConfig) -> Removal:
    """Return the removal with the size of its files on disk or in the bucket. Unchanged if the bucket fails."""
    if removal.files is None:
        return removal
    try:
        return replace(removal, size_bytes=stored_bytes(config.path_of(removal.files.folder)))
    except StorageError:
        return removal


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()
