"""The way of a training request: committed to the log before it is acknowledged, and its outcome before it is answered.

What is special about an operation stands in `operations.py`; this is what they have in common.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sqlmodel import Session

from skyrl.backends.operations import LoadCheckpoint, Publish, SaveCheckpoint
from skyrl.errors import RequestError
from skyrl.tinker import json_text, request_log
from skyrl.tinker.admission import Accepted, Admission, Obsolete
from skyrl.tinker.auth import Caller
from skyrl.tinker.channel import DropVersion
from skyrl.tinker.futures import PROTOBUF, Answer, Failure
from skyrl.tinker.operations import QueuedOperation
from skyrl.tinker.parsing import Body
from skyrl.tinker.service import Service, off_loop
from skyrl.tinker.submission import Busy, accept, admit, frame_of, refused_as_finished, rejected
from skyrl.tinker.tasks import Tasks
from skyrl.types import ErrorResponse, ForwardBackwardOutput, Result

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 2 * 2**30
"""What training requests that wait may take, together. Past them a submission is turned away for a second (429)."""
OVERHEAD_BYTES = 4096
"""What a training request counts for beside its body."""


@dataclass(frozen=True)
class _InEngine:
    """A request whose end the engine owes us."""

    operation: QueuedOperation
    accepted: Accepted
    bytes: int


class TrainingQueue:
    """Takes training requests in and answers them. All methods are called on the event loop.

    Args:
        service: The server's parts.
        reads: Whether something else may still read a checkpoint's folder.
    """

    def __init__(self, service: Service, reads: Callable[[str], bool]):
        self._service = service
        self._futures = service.futures
        self._reads = reads
        self._pending: dict[str, _InEngine] = {}
        self._pending_bytes = 0
        self._tasks = Tasks()

    # -- in -----------------------------------------------------------------------------------------------------------

    async def submit(self, operation: QueuedOperation, body: Body, caller: Caller) -> str:
        """Take in a request. Returns its request id, that of an earlier equal request if there is one.

        Raises as `admit`, and `Busy`: too many bytes wait already.
        """
        size, waiting = OVERHEAD_BYTES + len(body.data), self._pending_bytes
        if waiting and waiting + size > MAX_PENDING_BYTES:
            raise Busy(f"training requests of {waiting} bytes are queued already; send this one again in a second")
        admission, parsed = await admit(self._service, operation, body, caller)
        refusal: Failure | None = None
        try:
            accepted = await accept(operation, admission, parsed)
        except RequestError as error:
            accepted = rejected(admission, str(error), parsed.is_pass)
            if admission.target.creates:  # its model will never be, so there is no order to keep
                refusal = Failure(str(error), "user")
        return await self._log_and_send(operation, admission, accepted, refused_as_finished(admission) or refusal, body)

    async def _log_and_send(
        self,
        operation: QueuedOperation,
        admission: Admission,
        accepted: Accepted,
        refusal: Failure | None,
        body: Body,
    ) -> str:
        request_id, target = admission.request_id, admission.target
        entry = request_log.Entry(
            request_id=request_id,
            kind=operation.name,
            tenant=target.tenant,
            model_id=target.model_id,
            seq_id=target.seq_id,
            body=body.data,
            content_type=body.content_type,
            content_encoding=body.content_encoding,
            needs_model=not target.creates,
        )
        # Known from here on, so that an engine that ends meanwhile fails it and a poll never finds it missing.
        future = self._futures.add(request_id, target.tenant)
        self._owe(request_id, _InEngine(operation, accepted, OVERHEAD_BYTES + len(body.data)))
        try:
            job = partial(request_log.append, entry=entry, refusal=refusal, on_log=accepted.on_log)
            logged = await self._service.database.write(job)
        except BaseException:
            self._forget(request_id)
            raise
        if logged.request_id != request_id:
            self._forget(request_id)
        elif logged.refusal is not None:
            self._settled(request_id)
            self._futures.set(request_id, logged.refusal)
        elif future.outcome is None:
            self._service.directory.forget(target.model_id)
            self._service.engine.send(frame_of(admission, accepted))
        return logged.request_id

    def _owe(self, request_id: str, entry: _InEngine) -> None:
        self._pending[request_id] = entry
        self._pending_bytes += entry.bytes

    def _settled(self, request_id: str) -> _InEngine | None:
        entry = self._pending.pop(request_id, None)
        if entry is not None:
            self._pending_bytes -= entry.bytes
        return entry

    def _forget(self, request_id: str) -> None:
        self._settled(request_id)
        self._futures.drop(request_id)

    # -- what the engine says -----------------------------------------------------------------------------------------

    def done(self, request_id: str, result: Result) -> None:
        """The engine has finished a request."""
        entry = self._settled(request_id)
        if entry is not None:
            self._tasks.start(self._finish(request_id, entry, result))

    def lose_all(self, reason: str) -> None:
        """The engine has ended by itself: what was pending fails."""
        pending, self._pending, self._pending_bytes = self._pending, {}, 0
        for request_id in pending:
            self._futures.set(request_id, Failure(request_log.lost_message(reason), "server"))
        self._tasks.start(self._lose_models(reason))

    async def _lose_models(self, reason: str) -> None:
        await self._service.database.write(partial(request_log.lose_models, reason=reason))
        self._service.directory.forget_all()

    async def settle(self) -> None:
        """Wait until every result that has arrived is stored."""
        await self._tasks.settle()

    async def discard(self, files: Obsolete) -> None:
        """Remove files that nobody names any more, unless something may still read them."""
        if not self._is_in_use(files.folder):
            self._service.engine.send(DropVersion(files.version))
            await asyncio.to_thread(shutil.rmtree, files.folder, ignore_errors=True)

    # -- finishing ----------------------------------------------------------------------------------------------------

    async def _finish(self, request_id: str, entry: _InEngine, result: Result) -> None:
        """Store the outcome, answer it, and remove files that it leaves without a name."""
        operation = entry.accepted.operation
        obsolete: Obsolete | None = None
        try:
            outcome, obsolete = await self._outcome_of(request_id, entry, result)
        except Exception as error:  # whatever it is, somebody waits for an answer
            log.error("internal error while finishing request %s", request_id, exc_info=error)
            outcome = Failure(f"internal error (request {request_id}); the server's log has the details", "server")
        self._service.directory.forget(*entry.accepted.changes)
        self._futures.set(request_id, outcome)
        if isinstance(outcome, Failure) and isinstance(operation, SaveCheckpoint | Publish):
            await asyncio.to_thread(shutil.rmtree, operation.path, ignore_errors=True)
        if obsolete is not None:
            await self.discard(obsolete)

    async def _outcome_of(
        self, request_id: str, entry: _InEngine, result: Result
    ) -> tuple[Answer | Failure, Obsolete | None]:
        write = self._service.database.write
        if isinstance(result, ErrorResponse):
            failure = Failure(result.error, result.status)
            await write(partial(_store_failure, request_id, failure, entry.accepted))
            return failure, None
        if entry.accepted.complete is not None:
            result = await entry.accepted.complete(result)
        if entry.operation.encode is None:
            return await write(partial(_store_result, request_id, entry.accepted, result))
        encode = partial(entry.operation.encode, result)
        answer = Answer(await off_loop(_size(result), encode), PROTOBUF)
        await write(partial(request_log.finish, request_id=request_id, outcome=answer))
        return answer, None

    def _is_in_use(self, folder: str) -> bool:
        operations = (entry.accepted.operation for entry in self._pending.values())
        loads = any(isinstance(operation, LoadCheckpoint) and operation.path == folder for operation in operations)
        return loads or self._reads(folder)


def _size(result: Result) -> int:
    """Bytes of a result's arrays."""
    if isinstance(result, ForwardBackwardOutput):
        return sum(array.nbytes for outputs in result.loss_fn_outputs for array in outputs.values())
    return 0


def _store_result(
    request_id: str, accepted: Accepted, result: Result, session: Session
) -> tuple[Answer | Failure, Obsolete | None]:
    outcome: Answer | Failure
    obsolete = None
    try:
        payload, obsolete = accepted.record(session, result)
        outcome = Answer(json_text.dumps(payload))
    except RequestError as error:
        outcome = Failure(str(error), "user")
    request_log.finish(session, request_id, outcome)
    return outcome, obsolete


def _store_failure(request_id: str, failure: Failure, accepted: Accepted, session: Session) -> None:
    accepted.on_failure(session)
    request_log.finish(session, request_id, failure)
