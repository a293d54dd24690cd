"""The write-ahead log in the database: what was asked of each model, and what came of it.

The functions here are jobs of the database's one writer, which runs them one after the other; so what they read is
still true when they write, and two equal requests cannot both be new.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import update
from sqlmodel import Session, col, select

from skyrl.errors import UnknownName
from skyrl.tinker.futures import Answer, Failure, Lost, Outcome
from skyrl.tinker.tables import ModelRow, RequestRow

LOST_ADVICE = (
    "make a new training client from its last checkpoint (create_training_client_from_state_with_optimizer), or a "
    "fresh one; saved checkpoints and samplers still work"
)


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
    """Whether the model must be there; its creation does not need it."""


@dataclass(frozen=True)
class Logged:
    """What the log says of an entry."""

    request_id: str
    """The entry's own, or that of the equal request that came before it."""
    refusal: Failure | None = None
    """Why it cannot be worked on. It is in the log as failed, unless another kind of request has its place there."""


def append(session: Session, entry: Entry, refusal: Failure | None, on_log: Callable[[Session], None]) -> Logged:
    """Log a request, unless its model has one with its seq_id already.

    Args:
        session: Transaction to write in.
        entry: The request.
        refusal: Why it is refused already, if it is.
        on_log: More to write when the request is new and not refused.
    """
    if entry.seq_id is not None:
        same = select(RequestRow.request_id, RequestRow.kind).where(
            RequestRow.model_id == entry.model_id, RequestRow.seq_id == entry.seq_id
        )
        if (earlier := session.exec(same).first()) is not None:
            request_id, kind = earlier
            return Logged(request_id) if kind == entry.kind else Logged(entry.request_id, _taken(entry, kind))
    if refusal is None and entry.needs_model:
        refusal = _refused_by_status(session.get(ModelRow, entry.model_id), entry.model_id)
    if refusal is None:
        on_log(session)
    row = RequestRow(
        request_id=entry.request_id,
        kind=entry.kind,
        tenant=entry.tenant,
        model_id=entry.model_id,
        seq_id=entry.seq_id,
        body=b"" if refusal else entry.body,
        content_type=entry.content_type,
        content_encoding=entry.content_encoding,
    )
    if refusal:
        row.status, row.error, row.category, row.finished_at = "failed", refusal.error, refusal.category, time.time()
    session.add(row)
    return Logged(entry.request_id, refusal)


def finish(session: Session, request_id: str, outcome: Answer | Failure) -> None:
    """Store a request's outcome. Its body, which has served its purpose, is dropped."""
    values: dict[str, object] = {"body": b"", "finished_at": time.time()}
    if isinstance(outcome, Answer):
        values |= {"status": "done", "result": outcome.body, "result_type": outcome.media_type}
    else:
        values |= {"status": "failed", "error": outcome.error, "category": outcome.category}
    session.execute(update(RequestRow).where(col(RequestRow.request_id) == request_id).values(**values))


def outcome_of(session: Session, request_id: str) -> tuple[str, Outcome]:
    """(tenant, outcome) of a logged request that is no longer pending. Raises `UnknownName` if it is not in the log."""
    row = session.get(RequestRow, request_id)
    if row is None:
        raise unknown_request(request_id)
    if row.result is not None and row.result_type is not None:
        return row.tenant, Answer(row.result, row.result_type)
    if row.error is not None:
        return row.tenant, Failure(row.error, "user" if row.category == "user" else "server")
    return row.tenant, Lost()


def drop_old_results(session: Session, finished_before: float) -> None:
    """Forget results that nobody has asked for in a long time. What remains still tells an equal request apart."""
    old = col(RequestRow.finished_at) < finished_before
    session.execute(update(RequestRow).where(old, col(RequestRow.result).is_not(None)).values(result=None))


def unknown_request(request_id: str) -> UnknownName:
    return UnknownName(f"request_id={request_id[:300]!r} is not known; use the one that the submission returned")


def lose_models(session: Session, reason: str) -> None:
    """The engine is gone: whatever was pending has failed, and models that were in it are lost."""
    failed = {"status": "failed", "body": b"", "error": lost_message(reason), "category": "server"}
    pending = col(RequestRow.status) == "pending"
    session.execute(update(RequestRow).where(pending).values(**failed, finished_at=time.time()))
    in_engine = col(ModelRow.status).in_(["creating", "live"])
    session.execute(update(ModelRow).where(in_engine).values(status="lost"))


def lost_message(reason: str) -> str:
    return f"{reason}, and the model's training state in it is lost; {LOST_ADVICE}"


def _taken(entry: Entry, kind: str) -> Failure:
    error = (
        f"{entry.kind}: seq_id={entry.seq_id} of model {entry.model_id} was a {kind}; number a model's requests 1, 2, "
        "3, ... (its creation is 0), from one client only"
    )
    return Failure(error, "user")


def _refused_by_status(model: ModelRow | None, model_id: str) -> Failure | None:
    if model is not None and model.status in ("creating", "live"):
        return None
    if model is not None and model.status == "unloaded":
        return Failure(f"model_id={model_id} was unloaded; create a model, or load one of its checkpoints", "user")
    if model is not None and model.status == "copy":
        return Failure(f"model_id={model_id} holds a copy of a checkpoint; load that as a new model to train", "user")
    if model is not None and model.status == "failed":
        return Failure(f"model_id={model_id} could not be created; the error of its creation says why", "user")
    return Failure(f"model_id={model_id} was in an engine that has ended; {LOST_ADVICE}", "server")
