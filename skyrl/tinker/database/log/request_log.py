"""The write-ahead log in the database: requests of each model, and their outcomes.

The functions are jobs of the database's single writer, which runs them sequentially. Data that a job reads therefore
stay valid until it writes, and two equal requests cannot both be new. `replay_log.py` reads the log for revivals.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import bindparam, case, func, insert, select, update
from sqlmodel import Session, SQLModel, col

from skyrl.errors import UnknownName
from skyrl.tinker.database.decisions import Decisions
from skyrl.tinker.database.tables import CheckpointRow, ModelRow, RequestRow, ResultRow
from skyrl.tinker.results import Answer, Failure, Lost, Outcome
from skyrl.tinker.wire.sharing import LARGE_BYTES
from skyrl.types import GradientEffect

LOST_ADVICE = (
    "make a new training client from its last checkpoint (create_training_client_from_state_with_optimizer), or a "
    "fresh one, or restart the server once its files are back; saved checkpoints and samplers still work"
)
UNLOAD = "unload_model"
"""The only kind of request without a seq_id. A second unload of a model counts as a duplicate of the first."""
EXPIRED = (
    "can not be brought back any more: its session had been silent for longer than --session-retention-sec; load its "
    "last checkpoint (create_training_client_from_state_with_optimizer), or make a fresh training client; saved "
    "checkpoints still work"
)
_IS_PENDING = col(RequestRow.status) == "pending"

# Statements for every request are built once, from tables: building one from mapped classes takes ten times as long as
# running it. Statements on tables do not flush pending changes of earlier jobs in the session.
_REQUESTS = SQLModel.metadata.tables[str(RequestRow.__tablename__)]
_RESULTS = SQLModel.metadata.tables[str(ResultRow.__tablename__)]
_MODELS = SQLModel.metadata.tables[str(ModelRow.__tablename__)]
_SAME = select(_REQUESTS.c.request_id, _REQUESTS.c.kind).where(
    _REQUESTS.c.model_id == bindparam("model"), _REQUESTS.c.seq_id == bindparam("place")
)
_UNLOADED = select(_REQUESTS.c.request_id).where(
    _REQUESTS.c.model_id == bindparam("model"), _REQUESTS.c.kind == UNLOAD, _REQUESTS.c.status != "failed"
)
_STATUS = select(_MODELS.c.status).where(_MODELS.c.model_id == bindparam("model"))
_INSERT = insert(_REQUESTS)
_INSERT_RESULT = insert(_RESULTS)
_TOUCH = update(_MODELS).where(_MODELS.c.model_id == bindparam("model")).values(last_request_at=bindparam("now"))
_FINISH = update(_REQUESTS).where(_REQUESTS.c.request_id == bindparam("request"))


@dataclass(frozen=True)
class Entry:
    """A request to be logged."""

    request_id: str
    kind: str
    tenant: str
    model_id: str
    seq_id: int | None
    body: bytes
    content_type: str
    content_encoding: str
    needs_model: bool
    """True if the model must exist already. False for the request that creates it."""
    is_pass: bool = False
    """True if the request would add gradients, so a refusal leaves the gradient sums incomplete."""
    decided: Decisions = field(default_factory=Decisions)


@dataclass(frozen=True)
class Logged:
    """Result of logging an entry."""

    request_id: str
    """Id of the entry, or of the earlier duplicate."""
    refusal: Failure | None = None
    """Error of a refused request, which is logged as failed."""


def append(session: Session, entry: Entry, refusal: Failure | None, on_log: Callable[[Session], None]) -> Logged:
    """Log a request, unless its model already has one of the same kind and seq_id.

    Args:
        session: Transaction to write in.
        entry: The request.
        refusal: Failure, if the request was refused before it is logged.
        on_log: Further writes for a request that is new and not refused.
    """
    session.flush()
    connection = session.connection()
    seq_id, breaks_pass = entry.seq_id, entry.is_pass
    if seq_id is not None:
        earlier = connection.execute(_SAME, {"model": entry.model_id, "place": seq_id}).first()
        if earlier is not None:
            request_id, kind = earlier
            if kind == entry.kind:
                return Logged(request_id)
            refusal = _taken(entry, kind)
            seq_id, breaks_pass = None, False  # it has no place in the model's order
    if refusal is None and entry.needs_model:
        status = connection.execute(_STATUS, {"model": entry.model_id}).scalar_one_or_none()
        if status == "unloaded" and entry.kind == UNLOAD:
            earlier = connection.execute(_UNLOADED, {"model": entry.model_id}).first()
            if earlier is not None:
                return Logged(earlier.request_id)
        refusal = refused_by_status(status, entry.model_id)
        if status == "expired":
            refusal = _expired(session, entry.model_id)
    if refusal is None:
        on_log(session)
        session.flush()
    now = time.time()
    values: dict[str, object] = {
        "request_id": entry.request_id,
        "kind": entry.kind,
        "tenant": entry.tenant,
        "model_id": entry.model_id,
        "seq_id": seq_id,
        "body": b"" if refusal else entry.body,
        "content_type": entry.content_type,
        "content_encoding": entry.content_encoding,
        "decided": entry.decided,
        "status": "pending",
        "gradients": "kept",
        "created_at": now,
    }
    if refusal:
        values |= {"status": "failed", "error": refusal.error, "category": refusal.category, "finished_at": now}
        values |= {"gradients": "incomplete" if breaks_pass else "kept"}
    connection.execute(_INSERT, values)
    connection.execute(_TOUCH, {"model": entry.model_id, "now": now})
    return Logged(entry.request_id, refusal)


def cancel(session: Session, request_id: str, decided: Decisions) -> None:
    """Record that a pending request has to fail."""
    session.flush()
    pending = _FINISH.where(_REQUESTS.c.status == "pending")
    session.connection().execute(pending, {"request": request_id, "decided": decided})


def finish(
    session: Session,
    request_id: str,
    outcome: Answer | Failure,
    *,
    gradients: GradientEffect | Literal["done"] = "kept",
    keep_body: bool = False,
    decided: Decisions | None = None,
) -> None:
    """Store a request's outcome.

    Args:
        session: Transaction to write in.
        request_id: Id of the request.
        outcome: Answer or failure.
        gradients: Effect of a failure on the gradient sums; `DONE` if only the answer failed.
        keep_body: True if a revival without a newer snapshot has to repeat the request.
        decided: Decisions that replace the logged ones, for a request that was done although it was cancelled.
    """
    session.flush()
    connection, now = session.connection(), time.time()
    values: dict[str, object] = {"finished_at": now}
    if not keep_body:
        values["body"] = b""
    if decided is not None:
        values["decided"] = decided
    if isinstance(outcome, Answer):
        values |= {"status": "done"}
    else:
        values |= {"status": "failed", "error": outcome.error, "category": outcome.category, "gradients": gradients}
    found = connection.execute(_FINISH, {"request": request_id, **values})
    assert found.rowcount == 1, f"request {request_id} is not in the log"
    if isinstance(outcome, Answer):
        connection.execute(_INSERT_RESULT, _result_values(request_id, outcome.body, outcome.media_type, now))


def result_row(request_id: str, body: bytes, media_type: str, finished_at: float) -> ResultRow:
    """Return the row of a result."""
    return ResultRow(**_result_values(request_id, body, media_type, finished_at))


def _result_values(request_id: str, body: bytes, media_type: str, finished_at: float) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "media_type": media_type,
        "size_bytes": len(body),
        "finished_at": finished_at,
        "body": body,
    }


@dataclass(frozen=True)
class ExpiredResult:
    """The request was done, but its result was removed."""


@dataclass(frozen=True)
class LargeResult:
    """The request has a large result, which `result_of` reads."""

    size: int


def outcome_of(session: Session, request_id: str) -> tuple[str, Outcome | ExpiredResult]:
    """Return (tenant, outcome) of a logged request that is not pending. Raises `UnknownName` for unlogged requests."""
    tenant, outcome = small_outcome_of(session, request_id)
    return tenant, result_of(session, request_id) or ExpiredResult() if isinstance(outcome, LargeResult) else outcome


def small_outcome_of(session: Session, request_id: str) -> tuple[str, Outcome | ExpiredResult | LargeResult]:
    """Return (tenant, outcome) of a request, like `outcome_of`. For a result above `LARGE_BYTES`, the outcome is
    `LargeResult`, and the result is not read."""
    size = _RESULTS.c.size_bytes
    asked = (_REQUESTS.c.tenant, size, case((size <= LARGE_BYTES, _RESULTS.c.body)), _RESULTS.c.media_type)
    told = (_REQUESTS.c.error, _REQUESTS.c.category, _REQUESTS.c.status)
    both = _REQUESTS.outerjoin(_RESULTS, _RESULTS.c.request_id == _REQUESTS.c.request_id)
    query = select(*asked, *told).select_from(both).where(_REQUESTS.c.request_id == request_id)
    row = session.execute(query).first()
    if row is None:
        raise unknown_request(request_id)
    tenant, size, result, result_type, error, category, status = row
    if result is not None:
        return tenant, Answer(result, result_type)
    if size is not None:
        return tenant, LargeResult(size)
    if error is not None:
        return tenant, Failure(error, "user" if category == "user" else "server")
    return tenant, ExpiredResult() if status == "done" else Lost()


def result_of(session: Session, request_id: str) -> Answer | None:
    """Return the result of a request, or None if the result was removed."""
    query = select(_RESULTS.c.body, _RESULTS.c.media_type).where(_RESULTS.c.request_id == request_id)
    row = session.execute(query).first()
    return None if row is None else Answer(*row)


def unknown_request(request_id: str) -> UnknownName:
    return UnknownName(f"request_id={request_id[:300]!r} is not known; use the one that the submission returned")


# -- what an earlier server left --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PendingRow:
    """A request without an outcome that an earlier server accepted."""

    request_id: str
    kind: str
    tenant: str
    model_id: str
    seq_id: int | None
    decided: Decisions
    body_bytes: int


def pending(session: Session) -> list[PendingRow]:
    """Return all requests without an outcome, in order of arrival."""
    names = ("request_id", "kind", "tenant", "model_id", "seq_id", "decided")
    columns = [getattr(RequestRow, name) for name in names]
    query = select(*columns, func.length(RequestRow.body)).where(_IS_PENDING)
    rows = session.execute(query.order_by(col(RequestRow.created_at)))
    return [PendingRow(*row) for row in rows]


def lose_model(session: Session, model_id: str) -> None:
    """Mark a model as lost, because it cannot be revived: its files or log are missing or damaged."""
    model = session.get(ModelRow, model_id)
    if model is not None and model.status in ("creating", "live"):
        model.status = "lost"


def try_lost_models_again(session: Session) -> None:
    """Mark lost models as live at the start of a server, because their files may have been restored."""
    session.execute(update(ModelRow).where(col(ModelRow.status) == "lost").values(status="live"))


# -- refusals ---------------------------------------------------------------------------------------------------------


def _taken(entry: Entry, kind: str) -> Failure:
    error = (
        f"{entry.kind}: seq_id={entry.seq_id} of model {entry.model_id} was a {kind}; number a model's requests 1, 2, "
        "3, ... (its creation is 0), from one client only"
    )
    return Failure(error, "user")


def _expired(session: Session, model_id: str) -> Failure:
    """Return the failure of requests to an expired model. It names the model's last checkpoint."""
    saved = select(CheckpointRow).where(col(CheckpointRow.model_id) == model_id, col(CheckpointRow.kind) == "weights")
    last = session.execute(saved.order_by(col(CheckpointRow.id).desc()).limit(1)).scalar()
    which = f"its last checkpoint is tinker://{model_id}/weights/{last.name}" if last else "it has no checkpoint"
    return Failure(f"model_id={model_id} {EXPIRED}; {which}", "user")


def refused_by_status(status: str | None, model_id: str) -> Failure | None:
    """Return the failure of requests to a model with this status, or None. A status of None means an unknown model."""
    if status in ("creating", "live"):
        return None
    if status == "unloaded":
        return Failure(f"model_id={model_id} was unloaded; create a model, or load one of its checkpoints", "user")
    if status == "copy":
        return Failure(
            f"model_id={model_id} holds a copy of a checkpoint, or an upload; load that as a new model to train", "user"
        )
    if status == "failed":
        return Failure(f"model_id={model_id} could not be created; the error of its creation says why", "user")
    if status == "expired":
        return Failure(f"model_id={model_id} {EXPIRED}", "user")
    return Failure(f"model_id={model_id} is lost: what it was kept in is missing or damaged; {LOST_ADVICE}", "server")
