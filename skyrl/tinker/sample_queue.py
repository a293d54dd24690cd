"""The way of a sample: not logged, its future lives in memory. Where that is lost, the client sends it again."""

import logging
from dataclasses import replace
from functools import partial

from skyrl.backends.operations import Sample
from skyrl.errors import RequestError
from skyrl.tinker import ids, schemas
from skyrl.tinker.admission import Accepted
from skyrl.tinker.auth import Caller
from skyrl.tinker.channel import Cancel
from skyrl.tinker.completions import client_of
from skyrl.tinker.futures import PROTOBUF, Answer, Failure, Lost
from skyrl.tinker.operations import QueuedOperation
from skyrl.tinker.parsing import Body, SamplerAddress
from skyrl.tinker.sample_counts import SampleCounts
from skyrl.tinker.service import Service, off_loop
from skyrl.tinker.submission import Busy, accept, admit, frame_of, refused_as_finished
from skyrl.tinker.tasks import Tasks
from skyrl.types import ErrorResponse, Result, SampleOutput

log = logging.getLogger(__name__)

MAX_PENDING_SAMPLES = 20_000
"""Samples that may wait at a time. Past them a submission is turned away for a second (429)."""


class SampleQueue:
    """Takes samples in and answers them. All methods are called on the event loop."""

    def __init__(self, service: Service):
        self._service = service
        self._futures = service.futures
        self._pending: dict[str, tuple[QueuedOperation, Accepted]] = {}
        self._counts = SampleCounts(service.database)
        self._tasks = Tasks()

    async def submit(self, operation: QueuedOperation, body: Body, caller: Caller) -> tuple[str, int]:
        """Take in a sample. Returns (request id, number of sequences). Raises as `admit`, and `Busy`."""
        admission, parsed = await admit(self._service, operation, body, caller)
        assert isinstance(parsed.address, SamplerAddress)
        key, count = (parsed.address.sampling_session_id, parsed.address.seq_id), parsed.address.num_samples
        request_id, target = ids.sample_id(*key), admission.target
        admission = replace(admission, request_id=request_id)
        refusal: Failure | None = None
        accepted: Accepted | None = None
        try:
            accepted = await accept(operation, admission, parsed)
        except RequestError as error:
            refusal = Failure(str(error), "user")
        refusal = refused_as_finished(admission) or refusal
        await self._counts.reach(key)
        # No await from here on: of two equal requests the second finds the first.
        if (earlier := self._futures.sample_with(key)) is not None:
            return earlier, count
        if len(self._pending) >= MAX_PENDING_SAMPLES:
            raise Busy(f"{len(self._pending)} samples are queued already; send this one again in a second")
        self._futures.add(request_id, target.tenant, key)
        if refusal is not None or accepted is None:
            self._futures.set(request_id, refusal or Lost())
        else:
            self._pending[request_id] = operation, accepted
            self._service.engine.send(frame_of(admission, accepted))
        return request_id, count

    def done(self, request_id: str, result: Result) -> None:
        """The engine has finished a sample."""
        if (entry := self._pending.pop(request_id, None)) is not None:
            self._tasks.start(self._finish(request_id, entry[0], result))

    async def ended(self, request: schemas.RetrieveFuturesRequest, caller: Caller) -> schemas.RetrieveFuturesResponse:
        """The ends of a client's samples. Raises `UnknownName` for an unknown sampler."""
        target, completions = request.target, self._futures.completions
        sampler = await self._service.directory.sampler(target.sampling_session_id, caller)
        client = sampler.sampler_id, target.cloned_sampler_id
        for request_id in request.retrieved_request_ids:
            future = self._futures.get(request_id)
            if future and future.outcome and future.key and client_of(future.key) == client:
                self._futures.drop(request_id)
                completions.drop(client, request_id)
        lost: list[str] = []
        if request.prev_cursor < completions.start and sampler.created_at * 1e6 < completions.start:
            used = [ids.sample_id(sampler.sampler_id, seq_id) for seq_id in await self._counts.used(client)]
            lost = [request_id for request_id in used if self._futures.get(request_id) is None]
        longest = self._service.config.long_poll_s
        timeout_s = 0 if lost else longest if request.timeout is None else min(request.timeout, longest)
        events = await completions.poll(client, request.prev_cursor, timeout_s)
        ends = [schemas.SampleEnd.of(event.request_id, event.size) for event in events]
        ends += [schemas.SampleEnd.of(request_id, None) for request_id in lost]
        return schemas.RetrieveFuturesResponse(completions=ends, cursor=completions.cursor)

    def cancel(self, request_id: str, caller: Caller) -> None:
        """Drop a sample that waits or runs: nobody wants it any more. Any other request is left alone."""
        future = self._futures.get(request_id)
        if future is None or not caller.may_touch(future.tenant) or request_id not in self._pending:
            return
        del self._pending[request_id]
        self._service.engine.send(Cancel(request_id))
        self._futures.set(request_id, Failure("the sample was cancelled by its client", "user"))

    def lose_all(self) -> None:
        """The engine has ended by itself; what was pending is to be submitted again."""
        pending, self._pending = self._pending, {}
        for request_id in pending:
            self._futures.set(request_id, Lost())

    def reads(self, folder: str) -> bool:
        """Whether a pending sample may still read this folder."""
        operations = (accepted.operation for _, accepted in self._pending.values())
        return any(isinstance(operation, Sample) and operation.path == folder for operation in operations)

    async def settle(self) -> None:
        """Wait until every result that has arrived is answered."""
        await self._tasks.settle()

    async def _finish(self, request_id: str, operation: QueuedOperation, result: Result) -> None:
        if isinstance(result, ErrorResponse):
            self._futures.set(request_id, Failure(result.error, result.status))
            return
        assert operation.encode is not None and isinstance(result, SampleOutput)
        try:
            size = sum(sequence.tokens.nbytes for sequence in result.sequences)
            answer = Answer(await off_loop(size, partial(operation.encode, result)), PROTOBUF)
        except Exception as error:  # whatever it is, somebody waits for an answer
            log.error("internal error while finishing sample %s", request_id, exc_info=error)
            failure = Failure(f"internal error (request {request_id}); the server's log has the details", "server")
            self._futures.set(request_id, failure)
            return
        self._futures.set(request_id, answer)
