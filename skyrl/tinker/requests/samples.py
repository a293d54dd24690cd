"""Queue of samples. Samples are not logged: their futures are in memory, and clients resubmit lost samples.

Samples that an engine has not finished are sent to the next engine. Samples that were running when an engine exited are
suspects. After two such crashes a sample is sent alone, so that a further crash can be attributed to this sample. A
client that resubmits a sample after a restart of the server resubmits the same suspect.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from skyrl.backends.operations import Progress, Sample
from skyrl.errors import UnknownName
from skyrl.tinker.context import Service
from skyrl.tinker.database.ledger import charges
from skyrl.tinker.database.ledger.sample_charges import SampleCharges
from skyrl.tinker.database.queries.sample_counts import SampleCounts
from skyrl.tinker.errors import SampleFailed
from skyrl.tinker.identity import ids
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import client_of
from skyrl.tinker.operations.admission import Accepted, Admission, locate
from skyrl.tinker.operations.operation import QueuedOperation
from skyrl.tinker.operations.submission import Refused, accept, admit
from skyrl.tinker.processes.messages import Cancel, Enqueue
from skyrl.tinker.requests.futures import Futures
from skyrl.tinker.requests.outcomes import CANCELLED
from skyrl.tinker.requests.unwritten_versions import UnwrittenVersions
from skyrl.tinker.results import PROTOBUF, Answer, Failure, Lost
from skyrl.tinker.wire import schemas
from skyrl.tinker.wire.parsing import JSON_FACTOR, Body, Parsed, SamplerAddress
from skyrl.tinker.wire.sharing import encoded
from skyrl.types import ErrorResponse, Result, SampleOutput
from skyrl.utils.async_tasks import Tasks
from skyrl.utils.failpoints import crash_point
from skyrl.utils.quota import Quota

log = logging.getLogger(__name__)

MAX_PENDING_SAMPLES = 20_000
"""Maximum number of pending samples, divided between sharers (`skyrl.utils.quota`). Above a sharer's part, samples are
rejected with status 429, and the client retries after a second."""
MAX_PENDING_BYTES = 2 * 2**30
"""Maximum memory of pending samples in bytes, divided in the same way."""
OVERHEAD_BYTES = 4096
"""Bytes that each sample counts for in addition to its body, or to its prompt and targets."""
TOGETHER = 2
"""Number of engine crashes during a sample after which the sample is sent alone."""
STOP_BYTES = 64
"""Bytes of a stop token or string in memory, in addition to its size in the body."""


class Listener(Protocol):
    """Receiver of a sample's tokens as they are generated."""

    def tokens(self, report: Progress) -> None:
        """Handle new tokens of one sequence."""
        ...

    def restart(self) -> None:
        """Handle the exit of the engine: the next engine reports all tokens again, from the first."""
        ...


@dataclass(eq=False)
class WaitingSample:
    """A sample without an outcome."""

    operation: QueuedOperation
    sample: Sample
    bytes: int
    """Approximate size in memory."""
    sharer: str
    """Sharer whose quota the sample counts against; see `Caller.sharer`."""
    session_id: str
    """Session that requested the sample and is charged for it."""
    tenant: str


class SampleQueue:
    """Accepts and answers samples. All methods are called on the event loop.

    Args:
        service: The server's shared parts.
        futures: Futures of all requests.
        versions: Versions whose files are not on disk yet.
    """

    def __init__(self, service: Service, futures: Futures, versions: UnwrittenVersions):
        self._service = service
        self._futures = futures
        self._versions = versions
        versions.on_arrival = self._send_what_may_go
        self._pending: dict[str, WaitingSample] = {}
        self._unsent = UnsentSamples(versions.is_missing)
        """Samples of `_pending` that the current engine does not have."""
        self._number, self._bytes = Quota("{} samples"), Quota("samples of {} bytes")
        """Number and bytes of the samples in `_pending`."""
        self._read = Quota("unread samples of {} bytes")
        """Memory quota of samples whose bodies are being read."""
        self._listeners: dict[str, Listener] = {}
        """Listeners of samples in `_pending`."""
        self._alone: str | None = None
        """Suspect that the engine runs alone."""
        self._counts = SampleCounts(service.database)
        self.charges = SampleCharges(service.database)
        self._tasks = Tasks()

    async def submit(self, operation: QueuedOperation, body: Body, caller: Caller) -> tuple[str, int]:
        """Accept a sample. Returns (request id, number of sequences). Raises `Busy`, and the same errors as `admit`."""
        with self._read.reserved(caller.sharer, JSON_FACTOR * len(body.data), MAX_PENDING_BYTES):
            return await self._read_and_take_in(operation, body, caller)

    async def _read_and_take_in(self, operation: QueuedOperation, body: Body, caller: Caller) -> tuple[str, int]:
        admission, parsed = await admit(self._service, operation, body, caller)
        request_id, count = await self._take_parsed(operation, body, admission, parsed)
        return request_id, count

    async def submit_parsed(
        self, operation: QueuedOperation, body: Body, parsed: Parsed, caller: Caller, listener: "Listener | None" = None
    ) -> str:
        """Accept a sample whose request is not `body` itself, but made of it. Returns its request id.

        `listener` gets its tokens as they are generated. Raises the same errors as `submit`.
        """
        target = await locate(self._service, caller, parsed.address)
        assert isinstance(parsed.address, SamplerAddress)
        if self._futures.sample_with((parsed.address.sampling_session_id, parsed.address.seq_id)) is not None:
            raise SampleFailed("another client uses the sampler of these routes; send the request again")
        admission = Admission(self._service, caller, target, "")
        request_id, _ = await self._take_parsed(operation, body, admission, parsed, listener)
        return request_id

    async def _take_parsed(
        self,
        operation: QueuedOperation,
        body: Body,
        admission: Admission,
        parsed: Parsed,
        listener: "Listener | None" = None,
    ) -> tuple[str, int]:
        assert isinstance(parsed.address, SamplerAddress)
        key, count = (parsed.address.sampling_session_id, parsed.address.seq_id), parsed.address.num_samples
        request_id = ids.sample_id(*key)
        admission = replace(admission, request_id=request_id)
        if listener is not None:
            self._listeners[request_id] = listener
        try:
            return await self._take_in(operation, body, admission, parsed, key), count
        finally:
            self._service.version_use.taken_in(request_id)
            if request_id not in self._pending:
                self._listeners.pop(request_id, None)

    async def _take_in(
        self, operation: QueuedOperation, body: Body, admission: Admission, parsed: Parsed, key: tuple[str, int]
    ) -> str:
        """Queue a sample, or answer it with a refusal. Returns its request id, or the id of an earlier duplicate."""
        request_id, target = admission.request_id, admission.target
        accepted = await accept(operation, admission, parsed)
        refusal = accepted.failure if isinstance(accepted, Refused) else None
        if (error := self._service.crash_record.verdict(request_id)) is not None:
            refusal = Failure(error, "server")
        await self._counts.reach(key)
        # No await from here on, so that the second of two equal requests finds the first.
        if (earlier := self._futures.sample_with(key)) is not None:
            return earlier
        waiting = None
        if refusal is None:
            assert isinstance(accepted, Accepted) and isinstance(accepted.operation, Sample)
            waiting = WaitingSample(
                operation,
                accepted.operation,
                _size(body, accepted.operation),
                admission.caller.sharer,
                target.session.session_id,
                target.tenant,
            )
            self._number.check(waiting.sharer, 1, MAX_PENDING_SAMPLES)
            self._bytes.check(waiting.sharer, waiting.bytes, MAX_PENDING_BYTES)
        self._futures.add(request_id, target.tenant, key, admission.caller.sharer)
        if waiting is None:
            self._futures.set(request_id, refusal or Lost())
        else:
            self._pending[request_id] = waiting
            self._wait(request_id, waiting)
            self._number.add(waiting.sharer, 1)
            self._bytes.add(waiting.sharer, waiting.bytes)
            self._send_what_may_go()
        return request_id

    def done(self, request_id: str, result: Result, device_s: float) -> None:
        """Handle a sample that the engine has finished, after `device_s` seconds of device time."""
        if (entry := self._take(request_id)) is not None:
            if isinstance(result, SampleOutput):
                self._count(entry.sample, result)
            self._tasks.start(self._finish(request_id, entry, result, device_s))

    def progress(self, reports: Iterable[Progress]) -> None:
        """Pass new tokens to the listeners of their samples."""
        for report in reports:
            if (listener := self._listeners.get(report.request_id)) is not None:
                listener.tokens(report)

    def forget(self, request_id: str) -> None:
        """Drop the outcome of a sample, which nobody reads any more, or the sample itself, if it is pending."""
        future = self._futures.get(request_id)
        if future is None or future.key is None:
            return
        if request_id in self._pending:
            self._drop(request_id, "the sample was cancelled by its client")
        self._futures.drop(request_id)
        self._futures.completions.drop(client_of(future.key), request_id)

    async def ended(self, request: schemas.RetrieveFuturesRequest, caller: Caller) -> schemas.RetrieveFuturesResponse:
        """Return the finished samples of a client. Raises `UnknownName` for an unknown sampler."""
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
        """Drop a pending sample of the caller. Does nothing if the caller has no pending sample with this id."""
        future = self._futures.get(request_id)
        if future is None or not caller.may_touch(future.tenant) or request_id not in self._pending:
            return
        self._drop(request_id, "the sample was cancelled by its client")

    def cancel_by_order(self, request_id: str) -> None:
        """Drop a pending sample on behalf of an operator. The error that the client receives says so.

        Raises:
            UnknownName: There is no pending sample with this id.
        """
        if request_id not in self._pending:
            raise UnknownName(
                f"request_id={request_id[:300]!r} is not known as one that waits or runs; it may have ended"
            )
        self._drop(request_id, CANCELLED)

    def _drop(self, request_id: str, why: str) -> None:
        self._service.engine.send(Cancel(request_id, self._pending[request_id].sample.tenant))
        self._take(request_id)
        self._futures.set(request_id, Failure(why, "user"))

    def engine_ready(self) -> None:
        """Handle the start of a new engine."""
        self._send_what_may_go()

    def engine_ended(self, running: Collection[str]) -> None:
        """Handle an unexpected exit of the engine, which was working on `running`."""
        self._alone = None
        for request_id in running:
            if request_id in self._pending and (error := self._service.crash_record.verdict(request_id)) is not None:
                self._remove(request_id)
                self._futures.set(request_id, Failure(error, "server"))
                self._service.crash_record.acquit(request_id)
        self._unsent.clear()
        for listener in self._listeners.values():
            listener.restart()
        for request_id, waiting in self._pending.items():
            self._wait(request_id, waiting)

    def waiting(self) -> list[tuple[str, WaitingSample]]:
        """Pending samples with their ids, in order of arrival."""
        return list(self._pending.items())

    def waits_for(self, request_id: str) -> str | None:
        """Return the reason why the engine does not have a sample; None if the engine has it."""
        group = self._unsent.group_of(request_id)
        if group is None:
            return None
        suspect, version = group
        if self._versions.is_missing(version):
            return "its weights, which are brought back"
        return "the engine for itself alone: earlier ones ended while they worked on it" if suspect else "the engine"

    def reads(self, path: str) -> bool:
        """Return True if a pending sample may still read the folder at this path."""
        pending = any(waiting.sample.path == path for waiting in self._pending.values())
        return pending or self._service.version_use.enters(path)

    def sampled(self) -> dict[str, float]:
        """Time of the last sample of each version, in Unix seconds; infinity for versions of pending samples."""
        versions = (waiting.sample.version for waiting in self._pending.values())
        pending = {version: math.inf for version in versions if version is not None}
        return {**self._service.version_use.last(), **pending}

    async def drain(self) -> None:
        """Wait until all results that have arrived are answered."""
        await self._tasks.drain()
        await self.charges.drain()

    def _count(self, sample: Sample, result: SampleOutput) -> None:
        metrics = self._service.metrics.requests
        metrics.tokens(sample.tenant, "prompt", len(sample.prompt))
        metrics.tokens(sample.tenant, "sampled", sum(len(sequence.tokens) for sequence in result.sequences))

    def _take(self, request_id: str) -> WaitingSample | None:
        """Remove a sample, and send samples that waited for its end."""
        waiting = self._remove(request_id)
        if self._alone == request_id:
            self._alone = None
        if self._unsent:
            self._send_what_may_go()
        return waiting

    def _remove(self, request_id: str) -> WaitingSample | None:
        self._unsent.remove(request_id)
        waiting = self._pending.pop(request_id, None)
        self._listeners.pop(request_id, None)
        if waiting is not None:
            self._service.version_use.ended(waiting.sample)
            self._number.remove(waiting.sharer, 1)
            self._bytes.remove(waiting.sharer, waiting.bytes)
        return waiting

    def _send_what_may_go(self) -> None:
        """Send all unsent samples whose version is available, or one suspect."""
        if self._service.engine.state != "ready" or self._alone is not None:
            return
        suspect = self._unsent.first_suspect()
        if suspect is None:
            going = self._unsent.take_others()
        elif len(self._unsent) < len(self._pending):
            return  # the suspect would not be alone
        else:
            self._alone, going = suspect, [suspect]
            self._unsent.remove(suspect)
        for request_id in going:
            self._service.engine.send(Enqueue(self._pending[request_id].sample))
            self._futures.sent(request_id)

    def _wait(self, request_id: str, waiting: WaitingSample) -> None:
        suspect = self._service.crash_record.crashes(request_id) >= TOGETHER
        self._unsent.add(request_id, waiting.sample.version, suspect)

    async def _finish(self, request_id: str, waiting: WaitingSample, result: Result, device_s: float) -> None:
        if isinstance(result, ErrorResponse):
            self._futures.set(request_id, Failure(self._service.redact(result.error), result.status))
            return
        operation = waiting.operation
        assert operation.encode is not None and isinstance(result, SampleOutput)
        if any(np.isnan(one.logprobs).any() for one in result.sequences):
            self._futures.set(request_id, Failure(_not_a_number(waiting.sample), "user"))
            return
        try:
            body = await encoded(result.nbytes, partial(operation.encode, result))
            answer = Answer(body, PROTOBUF, result.sequences[0].fingerprint)
        except Exception as error:  # of any kind: the client waits for an answer
            log.error("internal error while finishing sample %s", request_id, exc_info=error)
            failure = Failure(f"internal error (request {request_id}); the server's log has the details", "server")
            self._futures.set(request_id, failure)
            return
        info, session_id, tenant = self._service.info, waiting.session_id, waiting.tenant
        charge = charges.of_sample(waiting.sample, result, session_id, tenant, info, device_s)
        await self.charges.store(request_id, charge)
        crash_point("api: sample charged, not answered")
        self._futures.set(request_id, answer)


def _not_a_number(sample: Sample) -> str:
    """Return the error for a sample whose model has weights that are not finite."""
    weights = "the base model" if sample.version is None else f"model_id={ids.model_of_version(sample.version)}"
    return (
        f"{weights} gives log-probabilities that are no numbers (NaN): its weights are not finite, as they get where a "
        "loss or a learning rate is far too high; load a checkpoint from before that, or make a new model"
    )


def _size(body: Body, sample: Sample) -> int:
    """Return the approximate bytes of a sample in memory. They are at least the size of its body."""
    targets, stop = sample.target_prompt_logprobs, sample.params.stop
    indices = () if targets is None else (targets.values, targets.crow_indices, targets.col_indices)
    arrays = [array for array in (sample.prompt, *indices) if array is not None]
    stops = len(stop) if isinstance(stop, list) else 0
    return OVERHEAD_BYTES + max(len(body.data), sum(array.nbytes for array in arrays) + STOP_BYTES * stops)


Group = tuple[bool, str | None]
"""(True for suspects, version) of a group of samples."""


class UnsentSamples:
    """Request ids of unsent samples.

    Args:
        is_missing: Returns True if samples of a version have to wait.
    """

    def __init__(self, is_missing: Callable[[str | None], bool]):
        self._is_missing = is_missing
        self._groups: dict[Group, dict[str, None]] = {}
        self._group_of: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    def add(self, request_id: str, version: str | None, suspect: bool) -> None:
        """Add a sample. A `suspect` is sent alone."""
        group = self._group_of[request_id] = (suspect, version)
        self._groups.setdefault(group, {})[request_id] = None

    def remove(self, request_id: str) -> None:
        """Remove a sample. Does nothing if the engine has it."""
        if (group := self._group_of.pop(request_id, None)) is not None:
            del self._groups[group][request_id]
            if not self._groups[group]:
                del self._groups[group]

    def group_of(self, request_id: str) -> Group | None:
        """Group of an unsent sample; None if the engine has the sample."""
        return self._group_of.get(request_id)

    def first_suspect(self) -> str | None:
        """Return a suspect that can be sent now, or None."""
        return next((next(iter(self._groups[group])) for group in self._ready(suspects=True)), None)

    def take_others(self) -> list[str]:
        """Remove and return all samples that can be sent now and are not suspects, in order of arrival per version."""
        taken = [request_id for group in list(self._ready(suspects=False)) for request_id in self._groups.pop(group)]
        for request_id in taken:
            del self._group_of[request_id]
        return taken

    def clear(self) -> None:
        self._groups.clear()
        self._group_of.clear()

    def _ready(self, suspects: bool) -> Iterator[Group]:
        return (group for group in self._groups if group[0] == suspects and not self._is_missing(group[1]))
