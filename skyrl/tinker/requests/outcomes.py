"""The end of a training request: commit the outcome, answer the client, then remove obsolete files.

Outcomes and snapshots of one model are stored in the order in which they arrive. If the log has the outcome of a
request, it therefore has the outcomes of all requests that finished earlier. (A save finishes when its files are
written, so later requests may finish before it.) If the database cannot store an outcome because its disk is full, the
write is retried until it succeeds. If the server stops before the write succeeds, no later outcome of this model is
stored either, and the next server repeats these requests.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from sqlmodel import Session

from skyrl.backends.operations import LoadCheckpoint, Publish, SaveCheckpoint
from skyrl.errors import RequestError, StorageError
from skyrl.tinker.checkpoints import trash
from skyrl.tinker.context import Service
from skyrl.tinker.database.database import Job
from skyrl.tinker.database.decisions import Decisions
from skyrl.tinker.database.ledger import charges
from skyrl.tinker.database.log import replay_log, request_log
from skyrl.tinker.database.log.request_log import ExpiredResult
from skyrl.tinker.database.queries.checkpoint_rows import UnreferencedFiles
from skyrl.tinker.database.retrying_writer import RetryingWriter, Stopped
from skyrl.tinker.database.tables import DONE, ModelRow
from skyrl.tinker.errors import DatabaseFull
from skyrl.tinker.identity.ids import model_of_version
from skyrl.tinker.processes.messages import DropVersion, Snapshotted
from skyrl.tinker.requests.futures import Futures
from skyrl.tinker.requests.pending_training import Pending, PendingRequest
from skyrl.tinker.results import PROTOBUF, Answer, Failure, Lost, Outcome
from skyrl.tinker.wire import strict_json
from skyrl.tinker.wire.sharing import encoded
from skyrl.types import ErrorResponse, ForwardBackwardOutput, Result, SaveOutput
from skyrl.utils.async_tasks import SerialTasks, Tasks
from skyrl.utils.failpoints import crash_point
from skyrl.utils.files.object_store import is_url
from skyrl.utils.files.stored_folders import remove_stored

log = logging.getLogger(__name__)

T = TypeVar("T")

CANCELLED = "the request was cancelled by the operator of the server; ask them why before you send it again"
"""Error message of requests that an operator cancelled."""


class Outcomes:
    """Stores outcomes of training requests. All methods are called on the event loop.

    Args:
        service: The server's shared parts.
        futures: Futures of all requests.
        pending: Training requests without an outcome.
        reads: Returns True if a sample may still read a folder.
    """

    def __init__(self, service: Service, futures: Futures, pending: Pending, reads: Callable[[str], bool]):
        self._service = service
        self._futures = futures
        self._pending = pending
        self._reads = reads
        self._serial = SerialTasks()
        self._tidying = Tasks()
        self._writer = RetryingWriter(service.database, DatabaseFull)
        self._last_writer = RetryingWriter(service.database, Exception)
        self._dropped: set[str] = set()
        """Models with an outcome that could not be stored before the stop. Later outcomes of a model are dropped."""

    # -- events to store ----------------------------------------------------------------------------------------------

    def finish(self, owed: PendingRequest, result: Result) -> None:
        """Store the outcome of a request and answer its client. The caller has removed the request from the pending
        ones."""
        self._add(owed.model_id, partial(self._finish, owed, result))

    def snapshotted(self, frame: Snapshotted) -> None:
        """Record a snapshot. Earlier requests of the model then need no replay."""
        self._add(frame.model_id, partial(self._record_snapshot, frame))

    def stored(self, version: str, saved: SaveOutput) -> None:
        """Record that an unnamed version is on disk."""
        self._add(model_of_version(version), partial(self._record_version, version, saved))

    def lose_model(self, model_id: str) -> None:
        """Record that a model cannot be revived any more."""
        self._add(model_id, partial(self._lose_model, model_id))

    async def discard(self, files: UnreferencedFiles) -> None:
        """Remove unreferenced files. Files that may still be read are left to retention."""
        crash_point("api: checkpoint unnamed, files still there")
        needed = await self._service.database.read(replay_log.folders_to_load)
        if files.folder not in needed and not self._is_in_use(files.folder):
            if files.version is not None:
                self._service.engine.send(DropVersion(files.version))
            await asyncio.to_thread(trash.discard, self._service.config, files.folder, files.to_trash)

    async def drained(self, model_id: str) -> None:
        """Wait until all outcomes of a model that have arrived are stored."""
        await self._serial.drained(model_id)

    async def drain(self) -> None:
        """Wait until all outcomes that have arrived are stored or given up."""
        self._writer.stop()
        self._last_writer.stop()
        await self._serial.drain()
        await self._tidying.drain()

    # -- storing ------------------------------------------------------------------------------------------------------

    def _add(self, model_id: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._serial.add(model_id, partial(self._in_line, model_id, work))

    async def _in_line(self, model_id: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if model_id in self._dropped:
            return
        try:
            await work()
        except Stopped as error:
            log.warning("%s; model %s continues from the state before it", error, model_id)
            self._dropped.add(model_id)

    async def _finish(self, owed: PendingRequest, result: Result) -> None:
        crash_point("api: result received, not stored")
        try:
            outcome, obsolete = await self._store(owed, result)
        except Stopped:
            raise
        except Exception as error:  # of any kind: the client waits for an answer
            log.error("internal error while finishing request %s", owed.request_id, exc_info=error)
            message = f"internal error (request {owed.request_id}); the server's log has the details"
            done = not isinstance(result, ErrorResponse)
            outcome, obsolete = await self._store_at_last(owed, ErrorResponse(message), done)
        crash_point("api: result stored, not answered")
        operation = owed.accepted.operation if owed.accepted else None
        self._service.directory.forget(owed.model_id, *(owed.accepted.changes if owed.accepted else ()))
        self._futures.set(owed.request_id, outcome)
        self._service.crash_record.acquit(owed.request_id)
        if isinstance(outcome, Failure) and isinstance(operation, SaveCheckpoint | Publish) and operation.path:
            await self._tidied(operation.path, asyncio.to_thread(_remove_stored, operation.path))
        if obsolete is not None:
            await self._tidied(self._service.path_of(obsolete.folder), self.discard(obsolete))

    async def _tidied(self, path: str, removal: Coroutine[Any, Any, None]) -> None:
        """Remove files.

        Removal from a bucket runs in the background, because an unavailable bucket may take minutes to fail.
        """
        if is_url(path):
            self._tidying.start(removal)
        else:
            await removal

    async def _store_at_last(
        self, owed: PendingRequest, error: ErrorResponse, done: bool
    ) -> tuple[Outcome, UnreferencedFiles | None]:
        """Store that a request has failed. Retries after any error.

        If the failure were reported but not stored, a revival would repeat the request.
        """
        job = _Once(owed.request_id, partial(_store_failure, owed, error, done=done))
        return await self._last_writer.write(job, f"that request {owed.request_id} has failed")

    async def _store(self, owed: PendingRequest, result: Result) -> tuple[Outcome, UnreferencedFiles | None]:
        if owed.accepted is not None and owed.accepted.complete is not None and not isinstance(result, ErrorResponse):
            try:
                result = await owed.accepted.complete(result)
            except StorageError as error:
                result = ErrorResponse(str(error))
        if isinstance(result, ErrorResponse):
            told = replace(result, error=self._service.redact(result.error))
            return await self._write(_Once(owed.request_id, partial(_store_failure, owed, told)))
        if owed.operation.encode is None:
            return await self._write(_Once(owed.request_id, partial(_store_result, owed, result)))
        answer = Answer(await encoded(_size(result), partial(owed.operation.encode, result)), PROTOBUF)
        return await self._write(_Once(owed.request_id, partial(_store_answer, owed, answer)))

    async def _record_snapshot(self, frame: Snapshotted) -> None:
        crash_point("api: snapshot reported, not recorded")
        snapshot = replace(frame, path=self._service.folder_of(frame.path))
        superfluous = await self._write(partial(replay_log.record_snapshot, snapshot=snapshot))
        crash_point("api: snapshot recorded, older files still there")
        await self._remove(superfluous)

    async def _record_version(self, version: str, saved: SaveOutput) -> None:
        superfluous = await self._write(partial(replay_log.record_version, version=version, saved=saved))
        await self._remove(superfluous)

    async def _remove(self, superfluous: str | None) -> None:
        """Remove the folder `superfluous`, which is no longer needed. None: do nothing."""
        if superfluous is not None:
            path = self._service.path_of(superfluous)
            await self._tidied(path, asyncio.to_thread(_remove_stored, path))

    async def _lose_model(self, model_id: str) -> None:
        await self._write(partial(request_log.lose_model, model_id=model_id))
        self._service.directory.forget(model_id)

    async def _write(self, job: Job[T]) -> T:
        """Run `job` in the database, with retries.

        Raises `Stopped` if the server stops before the database accepts it.
        """
        return await self._writer.write(job, "an outcome")

    def _is_in_use(self, folder: str) -> bool:
        path = self._service.path_of(folder)
        operations = (owed.accepted.operation for owed in self._pending if owed.accepted is not None)
        loads = any(isinstance(operation, LoadCheckpoint) and operation.path == path for operation in operations)
        return loads or self._reads(path)


def _remove_stored(path: str) -> None:
    """Remove a folder that has no row. The collector removes it later if it cannot be removed now."""
    try:
        remove_stored(path)
    except StorageError as error:
        log.warning("a folder that is not needed any more stays for now: %s", error)


def _size(result: Result) -> int:
    """Return the number of bytes in a result's arrays."""
    if isinstance(result, ForwardBackwardOutput):
        return sum(array.nbytes for outputs in result.loss_fn_outputs for array in outputs.values())
    return 0


# -- jobs of the database ---------------------------------------------------------------------------------------------


@dataclass
class _Once:
    """Database job that stores an outcome once: a retry first checks whether an earlier attempt was committed."""

    request_id: str
    job: Job[tuple[Outcome, UnreferencedFiles | None]]
    tried: bool = False

    def __call__(self, session: Session) -> tuple[Outcome, UnreferencedFiles | None]:
        if self.tried:
            _, outcome = request_log.outcome_of(session, self.request_id)
            if not isinstance(outcome, Lost | ExpiredResult):
                return outcome, None
        self.tried = True
        return self.job(session)


def _store_result(
    owed: PendingRequest, result: Result, session: Session
) -> tuple[Answer | Failure, UnreferencedFiles | None]:
    assert owed.accepted is not None, owed.request_id
    outcome: Answer | Failure
    obsolete = None
    try:
        payload, obsolete = owed.accepted.record(session, result)
        outcome = Answer(strict_json.dumps(payload))
    except RequestError as error:
        outcome = Failure(str(error), "user")
    return outcome, _end(session, owed, outcome) or obsolete


def _store_answer(owed: PendingRequest, answer: Answer, session: Session) -> tuple[Answer, UnreferencedFiles | None]:
    return answer, _end(session, owed, answer)


def _store_failure(
    owed: PendingRequest, error: ErrorResponse, session: Session, done: bool = False
) -> tuple[Failure, UnreferencedFiles | None]:
    """Store a failure. If `done`, the engine completed the operation, and only the answer failed."""
    failure = Failure(error.error, error.status)
    if owed.creates and (model := session.get(ModelRow, owed.model_id)) is not None and model.status == "creating":
        model.status = "failed"
    if done and _is_repeated(owed):
        decided = _as_done(owed)
        request_log.finish(session, owed.request_id, failure, gradients=DONE, keep_body=True, decided=decided)
    else:
        request_log.finish(session, owed.request_id, failure, gradients=error.gradients)
    return failure, _release(session, owed)


def _end(session: Session, owed: PendingRequest, outcome: Answer | Failure) -> UnreferencedFiles | None:
    keep_body = isinstance(outcome, Answer) and (_is_repeated(owed) or owed.decided.version is not None)
    decided = _as_done(owed) if isinstance(outcome, Answer) else None
    request_log.finish(session, owed.request_id, outcome, keep_body=keep_body, decided=decided)
    if owed.charge is not None and isinstance(outcome, Answer):
        charges.add(session, [owed.charge])
    return _release(session, owed)


def _as_done(owed: PendingRequest) -> Decisions | None:
    """Return the decisions that replace the logged refusal of a request that was cancelled but done nevertheless.

    Returns None if the request was not cancelled.
    """
    return owed.decided if owed.cancelled is not None else None


def _is_repeated(owed: PendingRequest) -> bool:
    """Return True if a revival has to repeat the request, because it changed the model."""
    return owed.operation.changes_model and not owed.decided.forward_only


def _release(session: Session, owed: PendingRequest) -> UnreferencedFiles | None:
    """Return the snapshot folder if it can be removed: the model is unloaded and needs no revival. Otherwise None."""
    model = session.get(ModelRow, owed.model_id)
    folder = replay_log.release(session, owed.model_id) if model is not None and model.status == "unloaded" else None
    return UnreferencedFiles(None, folder) if folder is not None else None
