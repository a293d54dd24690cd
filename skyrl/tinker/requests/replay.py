"""Revival of a model that is not in the engine: which operations are replayed, and what becomes of pending requests.

The state of a model follows from its newest snapshot and the later requests. `plan` decides from rows of the log alone
what to do with each of these requests:

    outcome   request                                      in the revival
    done      changed the model                            repeated; its first outcome stays
    done      published a version that is not on disk      repeated
    done      unloaded the model                           repeated after all pending requests
    done      any other (forward only, saves)              skipped
    failed    only its answer failed; it was computed      repeated; its failure stays
    failed    did not change the gradient sums             skipped
    failed    left these incomplete, or cleared them       replaced by the same failure
    pending   cancelled                                    fails at its position
    pending   before the last request with an outcome      finished from its files if these are complete,
              (only a save can be)                         otherwise repeated
    pending   after the last request with an outcome       sent after the revival as an ordinary request

`prepare` reads the bodies of these requests and accepts them again with the logged decisions of their first acceptance.
The result is a `Revival`.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from skyrl.backends.operations import LoadCheckpoint, LoadSnapshot, ModelOperation, Operation, Rejected
from skyrl.errors import RequestError, StorageError
from skyrl.tinker.context import Service
from skyrl.tinker.database.decisions import Decisions
from skyrl.tinker.database.log import replay_log, request_log
from skyrl.tinker.database.log.replay_log import History, LoggedRequest
from skyrl.tinker.database.tables import ModelRow
from skyrl.tinker.errors import MalformedBody
from skyrl.tinker.identity.callers import EVERYBODY
from skyrl.tinker.operations.admission import Accepted, Admission, Target
from skyrl.tinker.operations.submission import Refused, accept, not_served, rejected
from skyrl.tinker.operations.table import OPERATIONS
from skyrl.tinker.results import Failure
from skyrl.tinker.wire.parsing import Body, Limits
from skyrl.types import ErrorCategory, SaveOutput
from skyrl.utils.files.atomic_folders import Written
from skyrl.utils.files.object_store import is_url
from skyrl.utils.files.stored_folders import inspect_stored

log = logging.getLogger(__name__)

ANY_SIZE = Limits(max_bytes=2**62, max_parts=2**62)
"""No limits: bodies in the log were accepted under the limits of their time."""

Files = Mapping[str, SaveOutput]
"""Saves that are complete on disk, by folder."""


class Unrevivable(Exception):
    """A model cannot be revived now or, if `lost`, ever. The message has the reason."""

    def __init__(self, why: str, *, lost: bool = False, category: ErrorCategory = "server"):
        super().__init__(why)
        self.lost = lost
        self.category: ErrorCategory = category


class Unreachable(Exception):
    """The bucket with the files of a model does not answer. The message says why."""


@dataclass
class Plan:
    """Steps that revive a model."""

    steps: list[LoggedRequest | ModelOperation] = field(default_factory=list)
    """Steps in order; a logged request stands for its operation. Empty: the model has not been created yet."""
    next_seq_id: int = 0
    from_files: dict[str, SaveOutput] = field(default_factory=dict)
    """Results of pending saves (by request id) whose files are already complete on disk."""
    missed: list[str] = field(default_factory=list)
    """Requests that can be neither finished nor repeated, because the snapshot has a later state."""
    unloaded: bool = False
    """True if the model was unloaded, so the engine deletes it after its pending requests."""


def plan(history: History, files: Files) -> Plan:
    """Decide which steps revive a model. Raises `Unrevivable` if the log no longer has enough information."""
    model, since = history.model, history.model.snapshot_seq_id
    if (
        refusal := request_log.refused_by_status(model.status, model.model_id)
    ) is not None and model.status != "unloaded":
        raise Unrevivable(refusal.error, category=refusal.category)
    requests = history.requests
    ended = [request.seq_id for request in requests if request.status != "pending" and request.seq_id is not None]
    creation = next((request for request in requests if request.seq_id == 0), None)
    if since is None:
        if creation is None:
            raise Unrevivable("it was made before this server kept what brings models back", lost=True)
        if creation.status == "pending":
            return Plan()
    decision = Plan(_snapshot(model), max([since or 0, *ended]) + 1)
    for request in requests:
        if request.status == "pending":
            _decide_pending(request, requests, since, files, decision)
        elif request.is_done and request.seq_id is None:
            decision.unloaded = True
        elif request.is_done and _is_repeated(request, history.unwritten, files):
            if not request.has_body:
                raise Unrevivable(
                    f"request {request.request_id} is needed for replay but missing from the log", lost=True
                )
            decision.steps.append(request)
        elif request.status == "failed" and request.gradients != "kept":
            decision.steps.append(_refusal(model, request))
    return decision


def _snapshot(model: ModelRow) -> list[LoggedRequest | ModelOperation]:
    if model.snapshot_seq_id is None:
        return []
    if model.snapshot_folder is None or model.snapshot_digest is None:
        raise Unrevivable("it has no snapshot any more", lost=True)
    number, model_id = model.snapshot_seq_id, model.model_id
    steps: list[LoggedRequest | ModelOperation] = [
        LoadSnapshot(
            request_id=f"{model_id} as of {number}",
            tenant=model.tenant,
            model_id=model_id,
            path=model.snapshot_folder,
            digest=model.snapshot_digest,
        )
    ]
    if model.snapshot_failed_pass is not None:
        failed = f"failed pass of {model_id} before {number}"
        steps.append(
            Rejected(
                request_id=failed,
                tenant=model.tenant,
                model_id=model_id,
                error=model.snapshot_failed_pass,
                gradients="incomplete",
            )
        )
    return steps


def _is_repeated(request: LoggedRequest, unwritten: Mapping[str, str], files: Files) -> bool:
    version = request.decided.version
    if version is not None:
        return version in unwritten and unwritten[version] not in files
    return OPERATIONS[request.kind].changes_model and not request.decided.forward_only


def _refusal(model: ModelRow, request: LoggedRequest) -> Rejected:
    return Rejected(
        request_id=request.request_id,
        tenant=model.tenant,
        model_id=model.model_id,
        error=request.error or "it failed",
        gradients="dropped" if request.gradients == "dropped" else "incomplete",
    )


def _decide_pending(
    request: LoggedRequest, requests: Sequence[LoggedRequest], since: int | None, files: Files, decision: Plan
) -> None:
    if request.seq_id is None or request.seq_id >= decision.next_seq_id:
        return
    refused = request.decided.refused is not None
    saved = None if refused else files.get(request.decided.saved_to or "")
    if saved is not None:
        decision.from_files[request.request_id] = saved
    elif _came_late(request, requests):
        return  # the scheduler rejects it with an error
    elif refused or since is None or request.seq_id > since:
        decision.steps.append(request)
    else:
        decision.missed.append(request.request_id)


def _came_late(request: LoggedRequest, requests: Sequence[LoggedRequest]) -> bool:
    """Return True if a request with a higher seq_id had an outcome before this request arrived."""
    assert request.seq_id is not None
    return any(
        other.seq_id is not None
        and other.seq_id > request.seq_id
        and other.finished_at is not None
        and other.finished_at < request.created_at
        for other in requests
    )


# -- preparation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Revival:
    """Everything needed to revive a model."""

    plan: Plan
    tenant: str
    """Owner of the model."""
    operations: list[ModelOperation]
    """Operations for the engine, in order. Empty: the model has not been created yet."""
    accepted: dict[str, tuple[Accepted, Decisions]]
    """Pending requests whose bodies were read from the log, with the decisions about them."""
    written: dict[str, SaveOutput]
    """Saves by version, for versions that are complete on disk although the log counts them as unwritten."""
    published_again: set[str]
    """Versions that one of the operations publishes."""


async def prepare(service: Service, model_id: str, known: Mapping[str, Accepted]) -> Revival:
    """Read a model's log and create the operations of its revival.

    Args:
        service: The server's shared parts.
        model_id: A model that is not in the engine.
        known: Pending requests that are in memory already, by request id. These are not read from the log.

    Raises:
        Unrevivable: The model cannot be revived.
        Unreachable: The bucket with the model's files does not answer; try again later.
    """
    history = await service.database.read(partial(replay_log.history, model_id=model_id))
    if history is None:
        raise Unrevivable(f"model_id={model_id}: unknown model")
    if (error := not_served(service, history.model)) is not None:
        raise Unrevivable(error)
    saves = [folder for request in _pending(history) if (folder := request.decided.saved_to) is not None]
    files = await asyncio.to_thread(_complete, service, [*history.unwritten.values(), *saves])
    decision = plan(history, files)
    repeated = [step for step in decision.steps if isinstance(step, LoggedRequest)]
    read = {request.request_id: request for request in [*repeated, *_pending(history)]}
    wanted = [request_id for request_id in read if request_id not in known]
    bodies = await service.database.read(partial(replay_log.bodies, request_ids=wanted))
    again = dict(known)
    for request_id in wanted:
        again[request_id] = await _accept_again(service, history, read[request_id], bodies[request_id])
    operations = [
        again[step.request_id].operation if isinstance(step, LoggedRequest) else _placed(service, step)
        for step in decision.steps
    ]
    assert all(isinstance(operation, ModelOperation) for operation in operations), operations
    await asyncio.to_thread(_check_reachable, operations)
    return Revival(
        plan=decision,
        tenant=history.model.tenant,
        operations=[operation for operation in operations if isinstance(operation, ModelOperation)],
        accepted={
            request.request_id: (again[request.request_id], request.decided)
            for request in _pending(history)
            if request.request_id not in known
        },
        written={version: files[folder] for version, folder in history.unwritten.items() if folder in files},
        published_again={version for request in repeated if (version := request.decided.version) is not None},
    )


def _placed(service: Service, step: ModelOperation) -> ModelOperation:
    """Return the step with the current path of its snapshot."""
    return replace(step, path=service.path_of(step.path)) if isinstance(step, LoadSnapshot) else step


def _check_reachable(operations: Sequence[Operation]) -> None:
    """Raise `Unreachable` if an operation loads a snapshot or checkpoint from a bucket that does not answer."""
    for operation in operations:
        if isinstance(operation, LoadSnapshot | LoadCheckpoint) and is_url(operation.path):
            try:
                inspect_stored(operation.path)
            except StorageError as error:
                raise Unreachable(str(error)) from error


def _complete(service: Service, folders: Sequence[str]) -> dict[str, SaveOutput]:
    found = {folder: (path := service.path_of(folder), _written(path)) for folder in folders}
    return {folder: SaveOutput(path, *written) for folder, (path, written) in found.items() if written is not None}


def _written(path: str) -> Written | None:
    """Return the result of a completed write to a path.

    None if the write is incomplete or the store does not respond; the write is then repeated.
    """
    try:
        return inspect_stored(path)
    except StorageError as error:
        log.warning("%s", error)
        return None


def _pending(history: History) -> list[LoggedRequest]:
    return [request for request in history.requests if request.status == "pending"]


async def _accept_again(service: Service, history: History, request: LoggedRequest, body: Body) -> Accepted:
    """Accept a logged request again with its logged decisions, and return the operation.

    Raises `Unrevivable` if the request was done and this server cannot repeat it.
    """
    model = history.model
    target = Target(
        history.session, model.tenant, model.model_id, request.seq_id, creates=request.seq_id == 0, model=model
    )
    admission = Admission(service, EVERYBODY, target, request.request_id, request.decided, again=True)
    if request.decided.refused is not None:
        return rejected(admission, "", False)
    operation = OPERATIONS[request.kind]
    try:
        if (error := service.crash_record.verdict_on_body(request.request_id)) is not None:
            raise MalformedBody(error)
        with service.crash_record.decoding(model.model_id, request.request_id):
            parse = partial(operation.parse, body, ANY_SIZE)
            parsed = await service.decode_pool.run(model.tenant, len(body.data), parse)
            answer = await accept(operation, admission, parsed)
    except (RequestError, MalformedBody) as error:
        answer = Refused(Failure(str(error), "user"), keeps_place=True)
    if isinstance(answer, Accepted):
        return answer
    error = answer.failure.error
    if request.is_done:
        raise Unrevivable(f"request {request.request_id} is refused now: {error}")
    return rejected(admission, error, is_pass=operation.encode is not None)
