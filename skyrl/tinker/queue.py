"""The way of a queued request: parsed, accepted, logged, sent to the engine, finished, answered.

What is special about an operation stands in `operations.py`; this is what they have in common. A training request is
committed to the log before it is acknowledged, and its outcome before it is answered. A sample is neither: its future
lives in memory, and where it is lost, the client submits it again.
"""

import asyncio
import logging
import shutil
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from sqlmodel import Session

from skyrl.backends.operations import LoadCheckpoint, ModelOperation, Publish, Rejected, Sample, SaveCheckpoint
from skyrl.errors import RequestError
from skyrl.tinker import json_text, request_log
from skyrl.tinker.admission import Accepted, Admission, Obsolete, locate
from skyrl.tinker.auth import Caller
from skyrl.tinker.channel import DropVersion, Enqueue
from skyrl.tinker.futures import PROTOBUF, Answer, Failure, Futures, Lost, Outcome
from skyrl.tinker.ids import is_sample, new_request_id
from skyrl.tinker.operations import QueuedOperation
from skyrl.tinker.parsing import Body, Parsed, SamplerAddress
from skyrl.tinker.service import Service, off_loop
from skyrl.types import ErrorResponse, ForwardBackwardOutput, Result, SampleOutput

log = logging.getLogger(__name__)

MAX_PENDING_SAMPLES = 20_000
"""Samples that may wait at a time. Past them a submission is turned away for a second (429)."""
MAX_PENDING_BYTES = 2 * 2**30
"""What training requests that wait may take, together; past them likewise."""
OVERHEAD_BYTES = 4096
"""What a training request counts for beside its body."""


class Busy(Exception):
    """Too much is queued; the client should send the request again in a moment."""


@dataclass(frozen=True)
class _InEngine:
    """A request whose end the engine owes us."""

    operation: QueuedOperation
    accepted: Accepted
    bytes: int = 0
    """What it counts for among training requests."""


@dataclass(frozen=True)
class TryAgain:
    """A request is still being worked on."""

    queue_state: Literal["active", "paused_capacity"]
    reason: str | None


class RequestQueue:
    """Takes requests in and hands outcomes out. All methods are called on the event loop."""

    def __init__(self, service: Service):
        self._service = service
        self._futures: Futures = service.futures
        self._pending: dict[str, _InEngine] = {}
        self._pending_bytes = 0
        self._pending_samples = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # -- in -----------------------------------------------------------------------------------------------------------

    async def submit(self, operation: QueuedOperation, body: Body, caller: Caller) -> str:
        """Take in a training request. Returns its request id, that of an earlier equal request if there is one.

        Raises:
            MalformedBody: The body does not even say which request of which model it is.
            UnknownName: There is no such model or session.
            EngineStarting: The base model is not known yet.
            Busy: Too many bytes wait already.
        """
        size, waiting = OVERHEAD_BYTES + len(body.data), self._pending_bytes
        if waiting and waiting + size > MAX_PENDING_BYTES:
            raise Busy(f"training requests of {waiting} bytes are queued already; send this one again in a second")
        admission, parsed = await self._admit(operation, body, caller)
        refusal: Failure | None = None
        try:
            accepted = await _accept(operation, admission, parsed)
        except RequestError as error:
            accepted = _rejected(admission, str(error), parsed.is_pass)
            if admission.target.creates:  # its model will never be, so there is no order to keep
                refusal = Failure(str(error), "user")
        if admission.target.session.finished_at is not None:
            refusal = _finished(admission)
        return await self._log_and_send(operation, admission, accepted, refusal, body)

    async def sample(self, operation: QueuedOperation, body: Body, caller: Caller) -> tuple[str, int]:
        """Take in a sample. Returns (request id, number of sequences). Raises as `submit`, and `Busy`."""
        admission, parsed = await self._admit(operation, body, caller)
        request_id, target = admission.request_id, admission.target
        assert isinstance(parsed.address, SamplerAddress)
        key, count = (parsed.address.sampling_session_id, parsed.address.seq_id), parsed.address.num_samples
        refusal: Failure | None = None
        accepted: Accepted | None = None
        try:
            accepted = await _accept(operation, admission, parsed)
        except RequestError as error:
            refusal = Failure(str(error), "user")
        if target.session.finished_at is not None:
            refusal = _finished(admission)
        # No await from here on: of two equal requests the second finds the first.
        if (earlier := self._futures.sample_with(key)) is not None:
            return earlier, count
        if self._pending_samples >= MAX_PENDING_SAMPLES:
            raise Busy(f"{self._pending_samples} samples are queued already; send this one again in a second")
        self._futures.add(request_id, target.tenant, key)
        if refusal is not None or accepted is None:
            self._futures.set(request_id, refusal or Lost())
        else:
            self._owe(request_id, _InEngine(operation, accepted))
            self._send(admission, accepted)
        return request_id, count

    async def _admit(self, operation: QueuedOperation, body: Body, caller: Caller) -> tuple[Admission, Parsed]:
        await self._service.wait_until_ready()
        limit = self._service.config.max_body_bytes
        parsed = await off_loop(len(body.data), partial(operation.parse, body, limit))
        target = await locate(self._service, caller, parsed.address)
        return Admission(self._service, caller, target, new_request_id(operation.name)), parsed

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
            self._send(admission, accepted)
        return logged.request_id

    def _send(self, admission: Admission, accepted: Accepted) -> None:
        target = admission.target
        frame = Enqueue(admission.request_id, target.tenant, accepted.operation, target.seq_id)
        self._service.engine.send(frame)

    def _owe(self, request_id: str, entry: _InEngine) -> None:
        self._pending[request_id] = entry
        self._pending_bytes += entry.bytes
        self._pending_samples += is_sample(request_id)

    def _settled(self, request_id: str) -> _InEngine | None:
        entry = self._pending.pop(request_id, None)
        if entry is not None:
            self._pending_bytes -= entry.bytes
            self._pending_samples -= is_sample(request_id)
        return entry

    def _forget(self, request_id: str) -> None:
        self._settled(request_id)
        self._futures.drop(request_id)

    # -- what the engine says -----------------------------------------------------------------------------------------

    def done(self, request_id: str, result: Result) -> None:
        """The engine has finished a request."""
        entry = self._settled(request_id)
        if entry is not None:
            self._in_background(self._finish(request_id, entry, result))

    def held(self, request_id: str, reason: str | None) -> None:
        """The engine cannot start a request yet (or, None, now can)."""
        if (future := self._futures.get(request_id)) is not None:
            future.reason = reason

    def lose_all(self, reason: str) -> None:
        """The engine has ended by itself: training requests fail, samples are to be submitted again."""
        pending, self._pending = self._pending, {}
        self._pending_bytes = self._pending_samples = 0
        for request_id in pending:
            lost = Lost() if is_sample(request_id) else Failure(request_log.lost_message(reason), "server")
            self._futures.set(request_id, lost)
        self._in_background(self._lose_models(reason))

    async def _lose_models(self, reason: str) -> None:
        await self._service.database.write(partial(request_log.lose_models, reason=reason))
        self._service.directory.forget_all()

    async def settle(self) -> None:
        """Wait until every result that has arrived is stored."""
        await asyncio.gather(*self._tasks)

    # -- out ----------------------------------------------------------------------------------------------------------

    async def outcome(self, request_id: str, caller: Caller) -> Outcome | TryAgain:
        """The outcome of a request, waited for as long as a poll may take.

        Raises:
            UnknownName: There is no such training request.
        """
        future = self._futures.get(request_id)
        if future is not None and caller.may_touch(future.tenant):
            outcome = await future.wait(self._service.config.long_poll_s)
            return outcome or self._try_again(future.reason)
        if is_sample(request_id):
            return Lost()
        tenant, outcome = await self._service.database.read(lambda session: request_log.outcome_of(session, request_id))
        if not caller.may_touch(tenant):
            raise request_log.unknown_request(request_id)
        return outcome

    def _try_again(self, reason: str | None) -> TryAgain:
        engine = self._service.engine
        if engine.state == "ready":
            return TryAgain("active", reason)
        return TryAgain("paused_capacity", f"the engine is not ready: {engine.progress}")

    # -- finishing ----------------------------------------------------------------------------------------------------

    async def _finish(self, request_id: str, entry: _InEngine, result: Result) -> None:
        """Store the outcome (of a training request), answer it, and remove files that it leaves without a name."""
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
        if obsolete is not None and not self._is_in_use(obsolete.folder):
            self._service.engine.send(DropVersion(obsolete.version))
            await asyncio.to_thread(shutil.rmtree, obsolete.folder, ignore_errors=True)

    async def _outcome_of(
        self, request_id: str, entry: _InEngine, result: Result
    ) -> tuple[Answer | Failure, Obsolete | None]:
        write = self._service.database.write
        if isinstance(result, ErrorResponse):
            failure = Failure(result.error, result.status)
            if not is_sample(request_id):
                await write(partial(_store_failure, request_id, failure, entry.accepted))
            return failure, None
        if entry.operation.encode is None:
            return await write(partial(_store_result, request_id, entry.accepted, result))
        encode = partial(entry.operation.encode, result)
        answer = Answer(await off_loop(_size(result), encode), PROTOBUF)
        if not is_sample(request_id):
            await write(partial(request_log.finish, request_id=request_id, outcome=answer))
        return answer, None

    def _is_in_use(self, folder: str) -> bool:
        operations = (entry.accepted.operation for entry in self._pending.values())
        return any(isinstance(op, LoadCheckpoint | Sample) and op.path == folder for op in operations)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("internal error after a result", exc_info=error)


def _size(result: Result) -> int:
    """Bytes of a result's largest arrays."""
    if isinstance(result, ForwardBackwardOutput):
        return sum(array.nbytes for outputs in result.loss_fn_outputs for array in outputs.values())
    if isinstance(result, SampleOutput):
        return sum(sequence.tokens.nbytes for sequence in result.sequences)
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


async def _accept(operation: QueuedOperation, admission: Admission, parsed: Parsed) -> Accepted:
    if parsed.request is None:
        raise RequestError(parsed.error)
    return await operation.accept(admission, parsed.request)


def _finished(admission: Admission) -> Failure:
    return Failure(f"session {admission.target.session.session_id} is finished; start a new ServiceClient", "user")


def _rejected(admission: Admission, error: str, was_pass: bool) -> Accepted:
    operation: ModelOperation = Rejected(
        request_id=admission.request_id, model_id=admission.target.model_id, error=error, was_pass=was_pass
    )
    return Accepted(operation)
