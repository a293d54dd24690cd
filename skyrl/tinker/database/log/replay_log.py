"""Data for the revival of a model: its newest snapshot, later requests, and unwritten versions.

Bodies of requests are kept until a later snapshot covers them. If an unnamed version is not on disk yet, a revival
publishes it again by a replay of its request. The functions are jobs of the database.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import literal_column, or_, select, update
from sqlmodel import Session, col

from skyrl.tinker.database.decisions import Decisions
from skyrl.tinker.database.tables import DONE, WITH_BODY, ModelRow, RequestRow, SessionRow, VersionRow
from skyrl.tinker.processes.messages import Snapshotted
from skyrl.tinker.wire.parsing import Body
from skyrl.types import SaveOutput

AT_A_TIME = 1000
"""Maximum request ids per query, because databases limit the number of parameters."""
_HAS_BODY = literal_column(WITH_BODY)


@dataclass(frozen=True)
class LoggedRequest:
    """A row of the log without its large columns, body and result."""

    request_id: str
    kind: str
    seq_id: int | None
    status: str
    decided: Decisions
    gradients: str
    error: str | None
    has_body: bool
    created_at: float
    finished_at: float | None

    @property
    def is_done(self) -> bool:
        """True if the engine has completed the request, even if its answer failed."""
        return self.status == "done" or self.gradients == DONE


@dataclass(frozen=True)
class History:
    """A model and its requests since its newest snapshot."""

    model: ModelRow
    session: SessionRow
    requests: list[LoggedRequest]
    """All requests after the snapshot, and earlier ones that are pending, in the order of their seq_ids. Requests
    without a seq_id come last."""
    unwritten: dict[str, str]
    """Folder of each published version that may not be on disk, by version."""


def history(session: Session, model_id: str) -> History | None:
    """Return all data for the revival of a model. None: the model does not exist (any more)."""
    model = session.get(ModelRow, model_id)
    owner = session.get(SessionRow, model.session_id) if model is not None else None
    if model is None or owner is None:
        return None
    names = ("request_id", "kind", "seq_id", "status", "decided", "gradients", "error")
    columns = [getattr(RequestRow, name) for name in names]
    columns += [_HAS_BODY, RequestRow.created_at, RequestRow.finished_at]
    query = select(*columns).where(col(RequestRow.model_id) == model_id)
    place, pending = col(RequestRow.seq_id), col(RequestRow.status) == "pending"
    parts = [query]
    if (last := model.snapshot_seq_id) is not None:  # one by one, as each has an index
        parts = [query.where(place > last), query.where(place.is_(None)), query.where(pending)]
    found = {row.request_id: LoggedRequest(*row) for part in parts for row in session.execute(part)}
    requests = list(found.values())
    requests.sort(key=lambda request: (request.seq_id is None, request.seq_id or 0, request.created_at))
    return History(model, owner, requests, _unwritten(session, model_id))


def bodies(session: Session, request_ids: Sequence[str]) -> dict[str, Body]:
    """Return the bodies of requests, by request id."""
    columns = (RequestRow.request_id, RequestRow.body, RequestRow.content_type, RequestRow.content_encoding)
    found: dict[str, Body] = {}
    for start in range(0, len(request_ids), AT_A_TIME):
        some = col(RequestRow.request_id).in_(request_ids[start : start + AT_A_TIME])
        rows = session.execute(select(*map(col, columns)).where(some))
        found |= {request_id: Body(*rest) for request_id, *rest in rows}
    return found


def record_snapshot(session: Session, snapshot: Snapshotted) -> str | None:
    """Record a snapshot. A revival then needs no earlier requests.

    Returns the folder to remove, or None. It is the folder of the older snapshot or, if the model is gone or has a
    newer snapshot, the folder of this one.
    """
    model = session.get(ModelRow, snapshot.model_id)
    if model is None or (model.snapshot_seq_id is not None and model.snapshot_seq_id > snapshot.seq_id):
        return snapshot.path
    older = model.snapshot_folder
    model.snapshot_seq_id, model.snapshot_failed_pass = snapshot.seq_id, snapshot.failed_pass
    model.snapshot_folder, model.snapshot_digest = snapshot.path, snapshot.digest
    model.snapshot_bytes = snapshot.size_bytes
    covered = col(RequestRow.seq_id) <= snapshot.seq_id
    _drop_bodies(session, snapshot.model_id, covered, col(RequestRow.status) != "pending")
    return older if older != snapshot.path else None


def record_version(session: Session, version: str, saved: SaveOutput) -> str | None:
    """Record that a version is on disk. Returns the snapshot folder that is no longer needed, or None."""
    row = session.get(VersionRow, version)
    if row is None:
        return None
    row.digest, row.size_bytes = saved.digest, saved.size_bytes
    session.flush()
    model = session.get(ModelRow, row.model_id)
    return release(session, row.model_id) if model is not None and model.status == "unloaded" else None


def unwritten_versions(session: Session) -> dict[str, str]:
    """Return the model of each published version that may not be on disk, by version."""
    query = select(col(VersionRow.version), col(VersionRow.model_id)).where(col(VersionRow.digest).is_(None))
    return dict(session.execute(query).all())


def release(session: Session, model_id: str) -> str | None:
    """Forget the data for the revival of an unloaded model.

    Does nothing while the model has pending requests, or published versions that are not on disk.

    Returns:
        The folder of the model's snapshot, which is no longer needed. None if nothing was forgotten.
    """
    waits = select(col(RequestRow.request_id)).where(
        col(RequestRow.model_id) == model_id, col(RequestRow.status) == "pending"
    )
    if _unwritten(session, model_id) or session.execute(waits).first() is not None:
        return None
    model = session.get(ModelRow, model_id)
    assert model is not None, model_id
    folder = model.snapshot_folder
    model.snapshot_folder = model.snapshot_digest = model.snapshot_bytes = model.snapshot_failed_pass = None
    _drop_bodies(session, model_id)
    return folder


def folders_to_load(session: Session) -> set[str]:
    """Return the folders of checkpoints that a revival may load again, because no snapshot includes their load yet."""
    uncovered = or_(col(ModelRow.snapshot_seq_id).is_(None), col(RequestRow.seq_id) > col(ModelRow.snapshot_seq_id))
    query = (
        select(col(RequestRow.decided))
        .join(ModelRow, col(ModelRow.model_id) == col(RequestRow.model_id))
        .where(col(RequestRow.kind) == "load_weights", _HAS_BODY, uncovered)
        .where(col(ModelRow.status).in_(["creating", "live", "unloaded"]))
    )
    return {decided.folder for (decided,) in session.execute(query) if decided.folder is not None}


def _unwritten(session: Session, model_id: str) -> dict[str, str]:
    query = select(col(VersionRow.version), col(VersionRow.folder))
    query = query.where(col(VersionRow.model_id) == model_id, col(VersionRow.digest).is_(None))
    return dict(session.execute(query).all())


def _drop_bodies(session: Session, model_id: str, *which: Any) -> None:
    these = update(RequestRow).where(col(RequestRow.model_id) == model_id, _HAS_BODY, *which)
    session.execute(these.values(body=b""))
