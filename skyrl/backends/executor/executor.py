"""The executor loop: interleaves the training operations of many models with sampling.

A subclass defines three things: `run` runs an operation as a generator that yields quanta (units of work), `compute`
computes quanta, and `sampler` samples. The executor keeps each model's operations in order, alternates between models,
and runs one sampling burst per step, so a short request never waits for a long one. `compute` may give work to other
processes and return a future. The work is in flight until the future is done; nothing polls it. An operation may return
a `Future` for background work (such as writing a file). The operation completes when the future is done; later
operations of the model run meanwhile.

One thread calls `submit` and `step`. When another thread calls `notify`, `wait` in that thread checks for work again.
"""

import logging
import math
import threading
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from pydantic import BaseModel

from skyrl.backends.backend import (
    AbstractBackend,
    Completion,
    CreateModel,
    DeleteModel,
    ForwardBackward,
    LoadCheckpoint,
    LoadSnapshot,
    ModelOperation,
    Operation,
    OptimStep,
    Rejected,
    Sample,
)
from skyrl.backends.common.background_writer import Writer
from skyrl.backends.executor.phases import Demand, Phase, Phases
from skyrl.backends.executor.sampling_options import check_options
from skyrl.backends.executor.work_queue import Ended, Quantum, Work, WorkQueue
from skyrl.backends.statistics import Statistics
from skyrl.errors import BackendLost, RequestError, StorageError
from skyrl.types import ErrorResponse, GradientEffect, Result

__all__ = ["Executor", "Quantum", "SamplerLoop", "Work", "failure"]

log = logging.getLogger(__name__)

MAKES = CreateModel | LoadCheckpoint | LoadSnapshot
"""Operations that replace the complete state of a model."""


class SamplerLoop(Protocol):
    """Continuous sampling: `add` queues a request, and `burst` returns finished requests."""

    @property
    def busy(self) -> bool:
        """True if `burst` has something to do.

        If this becomes True without a call of this object, for example because a read has finished or an engine has
        answered, the sampler calls the executor's `notify`.
        """
        ...

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of the requests that the next burst may work on."""
        ...

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Ids of the requests that other processes sample, independently of bursts."""
        ...

    @property
    def statistics(self) -> Statistics:
        """The sampler's part of `AbstractBackend.statistics`."""
        ...

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the weights of tenants; the default weight is 1. Call before `add`."""
        ...

    def add(self, request: Sample) -> None:
        """Queue a request, fairly between tenants (`FairQueue`). Raises `RequestError` if the request can never run."""
        ...

    def burst(self) -> list[Completion]:
        """Admit waiting requests that fit, advance all running sequences, and return finished requests.

        May report the progress of other requests (`on_progress`). Raises `BackendLost`.
        """
        ...

    def cancel(self, request_id: str) -> None: ...


class Executor(AbstractBackend):
    """Base class of backends: implements `submit`, `step`, `cancel`. A subclass adds `run`, `compute` and a sampler."""

    sampler: SamplerLoop
    in_flight = 1
    """Maximum concurrent dispatches, if `compute` returns futures."""
    deadline_s: float | None = None
    """Time limit of a dispatch or of a change of phases in seconds. Then the backend is lost. None: no limit."""
    in_place = False
    """True if `compute` changes models directly, so a failed dispatch must not be retried.

    After a failed pass, the gradient sums are invalid until the model's next optimizer step, which fails and calls
    `discard_gradients`. A model whose operation was abandoned halfway is invalid until it is loaded again. An optimizer
    step that fails after it began to change weights must raise `BackendLost`.
    """

    dispatch_tokens = 0
    """A call of `compute` with fewer tokens gets more quanta of its kind, to be computed one after another.

    This saves messages and agreements of workers. Other models wait for the whole call.
    """

    phase_s = 2.0
    """Maximum seconds of a training or sampling phase while the other phase has work, if they share devices."""

    def __init__(self, base_model: str, config: BaseModel):
        super().__init__(base_model, config)
        self._work_queue = WorkQueue(self)
        self._lost: BackendLost | None = None
        self._background: dict[Future[Result], str] = {}
        self._sampling_s: defaultdict[str, float] = defaultdict(float)
        """Device seconds of samples that have not ended, by request."""
        self._failed_pass: dict[str, str] = {}
        self._void: set[str] = set()
        """Models with an interrupted operation."""
        self._wake = threading.Condition()
        self._writer = Writer(lambda version, saved: self.on_stored(version, saved))

    @abstractmethod
    def run(self, operation: ModelOperation) -> Work:
        """Run one operation as a generator: yield one `Quantum` or several, receive the answers, return the result.

        The generator may also compute something itself and yield None, which counts as a turn of cost 1. To wait, it
        yields a `Future`, which costs nothing. An operation that yields quanta must not compute anything before its
        first quantum, because it may be started before its turn.

        Raises `RequestError` if the operation is impossible. A failure must leave the model unchanged.
        """

    def compute(self, quanta: list[Quantum]) -> "list[Any] | Future[list[Any]]":
        """Return the answers to one quantum, or to several quanta of equal kind, or return a future of the answers.

        The call or the future may raise an exception. Unless `in_place`, no model may have changed then, and several
        quanta are retried one at a time. If a single quantum fails, its operation's `yield` raises the exception.
        `BackendLost` is for failures that no quantum caused; `step` raises it.
        """
        raise NotImplementedError(f"run of {type(self).__name__} yields quanta, so it needs compute")

    def may_wait(self, operation: ModelOperation) -> bool:
        """Return True if an operation that is started now may first yield a future to wait for."""
        return False

    def most_together(self, kind: Hashable) -> int:
        """Maximum number of quanta of this kind that are computed at the same time."""
        return 1

    @abstractmethod
    def discard_gradients(self, model_id: str) -> None:
        """Clear the model's gradient sums."""

    def submit(self, operation: Operation) -> None:
        with self._wake:
            if isinstance(operation, Sample):
                try:
                    check_options(operation, self.info)
                    self.sampler.add(operation)
                except Exception as error:
                    self._ready.append(Completion(operation.request_id, failure(operation, error)))
            else:
                assert isinstance(operation, ModelOperation), operation
                self._work_queue.add(operation)
            self._wake.notify_all()

    def submit_first(self, operation: ModelOperation) -> None:
        with self._wake:
            self._work_queue.add_first(operation)
            self._wake.notify_all()

    def weigh(self, weights: Mapping[str, float]) -> None:
        assert not self._work_queue
        self._work_queue = WorkQueue(self, weights)
        self.sampler.weigh(weights)

    def is_working_on(self, model_id: str) -> bool:
        return self._work_queue.has_begun(model_id)

    def cancel(self, request_id: str) -> None:
        self.sampler.cancel(request_id)
        self._sampling_s.pop(request_id, None)

    def refuse(self, refusal: Rejected) -> bool:
        with self._wake:
            ended = self._work_queue.refuse(refusal)
            for one in ended or ():
                self._ready += self._complete(one)
            self._wake.notify_all()
            return ended is not None

    def abandon(self) -> list[ModelOperation]:
        if self.in_place:
            self._void.update(operation.model_id for operation in self._work_queue.begun if _changes(operation))
        return self._work_queue.abandon()

    def failed_pass(self, model_id: str) -> str | None:
        return self._failed_pass.get(model_id)

    @property
    def writing(self) -> bool:
        return bool(self._background)

    def close(self) -> None:
        self._work_queue.close()
        self._writer.close()

    @property
    def busy(self) -> bool:
        if self._ready or self._lost is not None or any(future.done() for future in self._background):
            return True
        if self._phases is None:
            return self._work_queue.ready or self.sampler.busy
        demand = self._demand
        if self._phases.may_go_on(demand) or self._work_queue.answered:
            return True
        now = self._phases.now(demand)
        return self._work_queue.ready if now == "training" else now == "sampling" and self.sampler.busy

    @property
    def computed(self) -> tuple[str, ...]:
        return (*self._work_queue.computed, *self.sampler.elsewhere)

    @property
    def statistics(self) -> Statistics:
        return self._work_queue.statistics | self.sampler.statistics

    def time_left(self) -> float | None:
        left = self._work_queue.time_left()
        phase = None if self._phases is None else self._phases.time_left(self._demand)
        return min((seconds for seconds in (left, phase) if seconds is not None), default=None)

    def wait(self, timeout_s: float | None = None) -> bool:
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._wake:
            while not self.busy:
                left, own = until - time.monotonic(), self.time_left()
                if left <= 0:
                    return False
                left = left if own is None else min(left, own)
                self._wake.wait(None if left == math.inf else left)
            return True

    def step(self) -> list[Completion]:
        completions, self._ready = self._ready, []
        completions += self._finished_in_background()
        trains, samples = self._work_queue.ready, self.sampler.busy
        if self._phases is not None:
            now = self._phases.turn(self._demand)
            trains, samples = trains and now == "training", samples and now == "sampling"
        if trains:
            for ended in self._work_queue.turn():
                completions += self._complete(ended)
        elif self._work_queue.answered:
            for ended in self._work_queue.take_in():
                completions += self._complete(ended)
        if samples:
            completions += self._burst()
        if self._lost is not None:
            raise self._lost
        return completions

    def _burst(self) -> list[Completion]:
        """Run a sampling burst, and divide its duration equally among the running requests."""
        running = self.sampler.running
        self.on_quantum((*running, *self.computed))
        since = time.monotonic()
        completions = self.sampler.burst()
        share = (time.monotonic() - since) / max(1, len(running))
        for request_id in running:
            self._sampling_s[request_id] += share
        return [replace(one, device_s=self._sampling_s.pop(one.request_id, 0.0)) for one in completions]

    # -- hooks for shared devices -------------------------------------------------------------------------------------

    def sleep(self, phase: Phase) -> Future[Any] | None:
        """Release the device memory of a phase, which has no work in flight.

        This method and the next three are called only if training and sampling share devices (`_phases` is set). At
        first both phases are asleep and the sampler is paused. If a method returns a future, the executor waits for it.
        """

    def wake(self, phase: Phase) -> Future[Any] | None:
        """Allocate the device memory of a phase again."""

    def pause(self) -> Future[Any] | None:
        """Stop sampling until `resume`. Running samples keep their state."""

    def resume(self) -> Future[Any] | None:
        """Resume sampling."""

    @cached_property
    def _phases(self) -> Phases | None:
        return Phases(self) if self.info().colocated else None

    @property
    def _demand(self) -> Demand:
        sampling = self.sampler.busy or bool(self.sampler.elsewhere)
        return Demand(self._work_queue.ready, sampling, self._work_queue.in_flight)

    # -- completion ---------------------------------------------------------------------------------------------------

    def begin(self, operation: ModelOperation) -> Work:
        """Start an operation after the earlier ones of its model have ended. Raises the operation's failure."""
        model_id = operation.model_id
        if isinstance(operation, Rejected):
            if operation.gradients == "dropped":
                self._drop_gradients(model_id)
            raise RequestError(operation.error)
        if isinstance(operation, OptimStep) and model_id in self._failed_pass:
            cause = self._drop_gradients(model_id)
            raise IncompleteGradients(
                "optim_step: a forward_backward since the last optim_step failed, so its gradients are incomplete and "
                f"were dropped; correct the batch and send all of it again. The failure was: {cause}"
            )
        if model_id in self._void and not isinstance(operation, MAKES | DeleteModel):
            raise RequestError(f"model_id={model_id} has an interrupted operation; load it from a checkpoint")
        return self.run(operation)

    def _drop_gradients(self, model_id: str) -> str | None:
        """Clear the gradient sums and the record of a failed pass. Returns that record."""
        self.discard_gradients(model_id)
        return self._failed_pass.pop(model_id, None)

    def _complete(self, ended: Ended) -> list[Completion]:
        operation, result, device_s = ended
        if isinstance(result, Exception):
            result = replace(failure(operation, result), gradients=self._effect(operation, result))
        if isinstance(result, Future):
            self._background[result] = operation.request_id
            result.add_done_callback(lambda _: self.notify())
            return []
        if isinstance(result, ErrorResponse):
            if result.gradients == "incomplete":
                self._failed_pass.setdefault(operation.model_id, result.error)
        elif isinstance(operation, MAKES | DeleteModel):
            self._failed_pass.pop(operation.model_id, None)
            self._void.discard(operation.model_id)
        return [Completion(operation.request_id, result, device_s)]

    def _effect(self, operation: ModelOperation, error: Exception) -> GradientEffect:
        """Effect of an operation's failure on its model's gradient sums."""
        if not self.has_model(operation.model_id):  # without a model, no optimizer step can fail
            return "kept"
        if isinstance(operation, Rejected):
            return operation.gradients
        if isinstance(operation, ForwardBackward) and not operation.forward_only:
            return "incomplete"
        return "dropped" if isinstance(error, IncompleteGradients) else "kept"

    def _finished_in_background(self) -> list[Completion]:
        completions = []
        for future in [future for future in self._background if future.done()]:
            request_id = self._background.pop(future)
            error = future.exception()
            result = future.result() if error is None else failure(request_id, error)
            completions.append(Completion(request_id, result))
        return completions

    def notify(self) -> None:
        """Wake `wait`, from any thread, because `step` may have something to do."""
        with self._wake:
            self._wake.notify_all()
        self.on_wake()

    def hang(self) -> str:
        """Describe what is late, as the end of an error message; empty if nothing is known."""
        return ""

    def lose(self, error: BackendLost) -> None:
        """Report, from any thread, that the backend is lost.

        `step` raises the error, unless a dispatch in flight fails with a more specific error.
        """
        self._lost = self._lost or error
        self.notify()

    def on_answer(self, answers: "Future[list[Any]]") -> None:
        self.notify()


class IncompleteGradients(RequestError):
    """Failure of an optimizer step because the gradient sums were incomplete. The step has cleared them."""


def _changes(operation: ModelOperation) -> bool:
    """Return True if an operation's dispatches change its model."""
    return isinstance(operation, OptimStep) or (isinstance(operation, ForwardBackward) and not operation.forward_only)


def failure(operation: Operation | str, error: BaseException) -> ErrorResponse:
    """Return an error as the client sees it.

    Messages of `RequestError` and `StorageError` are passed on. The details of other errors go to the log only.
    """
    if isinstance(error, RequestError):
        return ErrorResponse(str(error), "user")
    if isinstance(error, StorageError):
        return ErrorResponse(str(error), "server", of_storage=True)
    request_id = operation if isinstance(operation, str) else operation.request_id
    kind = "" if isinstance(operation, str) else f"{type(operation).__name__} "
    log.error("internal error (%srequest %s)", kind, request_id, exc_info=error)
    return ErrorResponse(f"internal error (request {request_id}); the server's log has the details", "server")
