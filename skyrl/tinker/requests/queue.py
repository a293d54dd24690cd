"""Entry point for all queued requests: submission of training requests and samples, and retrieval of outcomes,
and handling of the engine's frames and exit."""

import json
import random
from dataclasses import dataclass
from functools import partial
from typing import Literal

from skyrl.tinker.checkpoints.retention import ENDED_AFTER_S
from skyrl.tinker.context import Service
from skyrl.tinker.database.log import request_log
from skyrl.tinker.database.log.request_log import ExpiredResult, LargeResult
from skyrl.tinker.database.queries.checkpoint_rows import UnreferencedFiles
from skyrl.tinker.database.retrying_writer import RetryingWriter
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import CUSTOM_LOSS, created_custom_loss, is_sample
from skyrl.tinker.processes.messages import (
    Done,
    FromEngine,
    Held,
    NewTokens,
    Parked,
    Ready,
    Running,
    Snapshotted,
    Stored,
)
from skyrl.tinker.requests.futures import Futures
from skyrl.tinker.requests.samples import SampleQueue
from skyrl.tinker.requests.training import TrainingQueue
from skyrl.tinker.requests.unwritten_versions import UnwrittenVersions
from skyrl.tinker.results import Answer, Failure, Lost, Outcome
from skyrl.types import SaveOutput


class EngineEvents:
    """Dispatches events of the engine to the other parts. All methods are called on the event loop.

    Args:
        service: The server's shared parts.
        futures: Futures of all requests.
        versions: Versions whose files are not on disk yet.
        samples: The queue of samples.
        training: The queue of training requests.
    """

    def __init__(
        self,
        service: Service,
        futures: Futures,
        versions: UnwrittenVersions,
        samples: SampleQueue,
        training: TrainingQueue,
    ):
        self._service = service
        self._futures = futures
        self._versions = versions
        self._samples = samples
        self._training = training
        self.sampling: tuple[str, ...] = ()
        """Samples in the most recent `Running` frame from the engine. Frames with training requests do not count."""

    def frame(self, frame: FromEngine) -> None:
        """Handle a frame from the engine."""
        match frame:
            case Ready():  # the engine gets all pending requests
                self._training.engine_models.engine_ready()
                self._samples.engine_ready()
                self._service.engine_ready()
            case Running(request_ids=request_ids):
                self._service.crash_record.computing(request_ids)
                self._futures.begin(request_ids)
                if not request_ids or is_sample(request_ids[0]):
                    self.sampling = request_ids
            case Held(request_id=request_id, reason=reason):
                if (future := self._futures.get(request_id)) is not None:
                    future.reason = reason
                self._training.held(request_id, reason is not None)
            case Done(request_id=request_id, result=result, device_s=device_s):
                self._service.crash_record.acquit(request_id)
                self._futures.done(request_id)
                (self._samples if is_sample(request_id) else self._training).done(request_id, result, device_s)
            case NewTokens(progress=progress):
                self._samples.progress(progress)
            case Snapshotted():
                self._service.metrics.engine.snapshots.inc()
                self._service.metrics.engine.snapshot_bytes.inc(frame.size_bytes)
                self._training.outcomes.snapshotted(frame)
            case Stored(version=version):
                self._versions.stored(version)
                self._training.outcomes.stored(version, SaveOutput(frame.path, frame.size_bytes, frame.digest))
            case Parked(model_id=model_id, done=done):
                self._training.engine_models.parked(model_id, done)
            case _:
                pass  # the supervisor handles frames about startup

    def ended(self, _reason: str) -> None:
        """Handle an unexpected exit of the engine. Unfinished requests go to the next engine."""
        running, self.sampling = self._service.crash_record.engine_ended(), ()
        self._service.metrics.engine.restarts.inc()
        self._futures.engine_ended()
        self._versions.engine_ended()
        self._samples.engine_ended(running)
        self._training.engine_models.engine_ended()
        self._training.fail_poisonous(running)


SHORTEST_POLL = 0.5
"""Minimum duration of a poll, as a fraction of `long_poll_s`. Durations are random, so that polls that began together
do not end together."""


@dataclass(frozen=True)
class TryAgain:
    """The request is still in progress; the client polls again."""

    queue_state: Literal["active", "paused_capacity"]
    reason: str | None


class RequestQueue:
    """Queue of all requests. All methods are called on the event loop."""

    def __init__(self, service: Service):
        self._service = service
        self.futures = Futures(service.metrics.requests)
        versions = UnwrittenVersions()
        self.samples = SampleQueue(service, self.futures, versions)
        self.training = TrainingQueue(service, self.futures, self.samples.reads, versions)
        self.events = EngineEvents(service, self.futures, versions, self.samples, self.training)

    async def restore(self, database: RetryingWriter) -> None:
        """Load the pending requests of an earlier server. Call before the engine is started."""
        await self.training.restore(database)

    async def cancel(self, request_id: str) -> None:
        """Cancel a request on behalf of an operator. Raises the same errors as `TrainingQueue.cancel`."""
        if is_sample(request_id):
            self.samples.cancel_by_order(request_id)
        else:
            await self.training.cancel(request_id)

    def park(self, session_id: str | None = None) -> None:
        """Park models of sessions that have ended or are idle.

        `session_id`: a session that its client has just ended.
        """
        activity, config = self._service.activity, self._service.config
        timeout_s = config.session_timeout_sec
        if timeout_s < 0:  # no timeout, but expired sessions need no models in the engine
            timeout_s = ENDED_AFTER_S + config.session_retention_sec
        if session_id is not None:
            activity.finished(session_id)
        self.training.engine_models.park(lambda session: activity.is_idle(session, timeout_s))

    async def discard(self, files: UnreferencedFiles) -> None:
        """Remove unreferenced files, unless something may still read them."""
        await self.training.outcomes.discard(files)

    def stop(self) -> None:
        """Send nothing more to the engine."""
        self.training.engine_models.stop()

    async def drain(self) -> None:
        """Wait until all results that have arrived are processed."""
        await self.samples.drain()
        await self.training.drain()

    async def outcome(self, request_id: str, caller: Caller) -> Outcome | LargeResult | TryAgain:
        """Return the outcome of a request, after waiting up to one long poll.

        Returns `LargeResult` for a large stored result, which `read` loads.

        Raises:
            UnknownName: There is no training request with this id.
        """
        future = self.futures.get(request_id)
        if future is not None and caller.may_touch(future.tenant):
            outcome = await future.wait(self._service.config.long_poll_s * random.uniform(SHORTEST_POLL, 1))
            return outcome or self._try_again(request_id, future.reason)
        if is_sample(request_id):
            await self.samples.charges.refund(request_id, caller)
            return Lost()
        if (loss_id := created_custom_loss(request_id)) is not None:
            loss = await self._service.directory.custom_loss("request_id", loss_id, caller)
            return Answer(json.dumps({"loss_id": loss.loss_id, "type": CUSTOM_LOSS}).encode())
        tenant, outcome = await self._service.database.read(
            partial(request_log.small_outcome_of, request_id=request_id)
        )
        if not caller.may_touch(tenant):
            raise request_log.unknown_request(request_id)
        return self._result_is_gone(request_id) if isinstance(outcome, ExpiredResult) else outcome

    def handed_out(self, request_id: str) -> None:
        """Record that the answer of a request is sent to its client."""
        if is_sample(request_id):
            self.samples.charges.handed_out(request_id)

    async def read(self, request_id: str, size: int, caller: Caller) -> Answer | Failure:
        """Load a large stored result. Loads are fair between senders. The caller must have access to the request."""
        job = partial(request_log.result_of, request_id=request_id)
        answer = await self._service.answers.read(caller.sharer, request_id, size, job)
        return self._result_is_gone(request_id) if answer is None else answer

    def _result_is_gone(self, request_id: str) -> Failure:
        """Return the failure for a finished training request whose result was removed.

        Resubmission does not help the client: the same request is not computed again.
        """
        config = self._service.config
        return Failure(
            f"request {request_id} was done, but its result is kept no longer (result_retention_sec="
            f"{config.result_retention_sec}, max_results_gib={config.max_results_gib:g}); go on without it, and read "
            "results sooner, or start the server with a larger --max-results-gib or --result-retention-sec",
            "user",
        )

    def _try_again(self, request_id: str, reason: str | None) -> TryAgain:
        engine = self._service.engine
        if engine.state == "ready":
            sampling = self.events.sampling
            if is_sample(request_id) and sampling and request_id not in sampling:
                return TryAgain("paused_capacity", f"waiting behind {len(sampling)} samples that run")
            return TryAgain("active", reason)
        return TryAgain("paused_capacity", f"the engine is not ready: {self._service.redact(engine.progress)}")
