"""The quantum loop: interleaves the training work of many models with sampling.

A subclass says how to run one operation as a generator that yields what it wants computed (`run`), how to compute it
(`compute`), and how to sample (`sampler`). The executor keeps each model's operations in order, takes turns between
models, and gives sampling one burst per step, so a short request never waits for a long one. What `compute` hands to
other processes is in flight until its future is done; nobody looks meanwhile. An operation may return a `Future` for
work that goes on in the background (a file being written); it completes when the future does, while the model moves on.

One thread submits and steps. Only `wait` may be left by another: what ends elsewhere wakes it (`notify`).
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
"""Operations after which nothing is left of what the model was before."""


class SamplerLoop(Protocol):
    """Continuous sampling: requests join at `add` and leave by themselves."""

    @property
    def busy(self) -> bool:
        """True if `burst` has something to do now. When this becomes true by something else than a call, such as the
        end of a read or an answer from elsewhere, the executor's `notify` is called."""
        ...

    @property
    def running(self) -> tuple[str, ...]:
        """Requests that the next burst may work on."""
        ...

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Requests that are worked on whether there is a burst or not, by other processes."""
        ...

    @property
    def statistics(self) -> Statistics:
        """Its part of `AbstractBackend.statistics`."""
        ...

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the weights of tenants, of which all others weigh 1. Before anything is added."""
        ...

    def add(self, request: Sample) -> None:
        """Queue a request, fairly between tenants (`FairQueue`). Raises `RequestError` if it can never run."""
        ...

    def burst(self) -> list[Completion]:
        """Admit what fits, advance every running sequence, return finished requests.

        May tell of the others (`on_progress`). Raises `BackendLost`.
        """
        ...

    def cancel(self, request_id: str) -> None: ...


class Executor(AbstractBackend):
    """`submit`, `step` and `cancel` on top of `run`, `compute`, `discard_gradients` and a sampler."""

    sampler: SamplerLoop
    in_flight = 1
    """Dispatches that may be under way at a time, where `compute` returns futures."""
    deadline_s: float | None = None
    """Seconds after which a dispatch that is under way has failed, and the backend with it; None: never."""
    in_place = False
    """True if `compute` changes models by itself, so that a dispatch which failed must not be tried again. Of a failed
    pass the gradient sums are void, until the model's next optimizer step fails and calls `discard_gradients`. A model
    whose operation was abandoned in the middle is void until it is loaded again. An optimizer step that fails after it
    began to change weights has to raise `BackendLost`."""

    phase_s = 2.0
    """Seconds that training or sampling goes on while the other has something to do, where they share devices."""

    def __init__(self, base_model: str, config: BaseModel):
        super().__init__(base_model, config)
        self._work_queue = WorkQueue(self)
        self._lost: BackendLost | None = None
        self._background: dict[Future[Result], str] = {}
        self._sampling_s: defaultdict[str, float] = defaultdict(float)
        """Seconds that samples which have not ended have taken."""
        self._failed_pass: dict[str, str] = {}
        self._void: set[str] = set()
        """Models with an interrupted operation."""
        self._wake = threading.Condition()
        self._writer = Writer(lambda version, saved: self.on_stored(version, saved))

    @abstractmethod
    def run(self, operation: ModelOperation) -> Work:
        """Do one operation: yield each `Quantum` that it needs, or several, and be sent the answers; return the result.

        It may as well compute something by itself and yield None, which is a turn that costs 1. Or it yields a `Future`
        that it waits for, which costs nothing. An operation that yields quanta must
        not compute anything before the first of them: it may be begun before its turn.

        Raises `RequestError` if it cannot be done. A failure must leave the model as it was before the operation.
        """

    def compute(self, quanta: list[Quantum]) -> "list[Any] | Future[list[Any]]":
        """The answers to several quanta of equal kind, or to one; or a future of these, if it is done elsewhere.

        If it raises, or its future does, nothing may have changed unless `in_place`: several quanta are then computed
        one by one, and the operation whose quantum cannot be computed alone is told, as if its `yield` had raised.
        `BackendLost` is what no quantum is to blame for: `step` raises it.
        """
        raise NotImplementedError(f"run of {type(self).__name__} yields quanta, so it needs compute")

    def may_wait(self, operation: ModelOperation) -> bool:
        """Return True if an operation that is begun now may yield what it waits for before anything else."""
        return False

    def most_together(self, kind: Hashable) -> int:
        """Most quanta of this kind that `compute` may be given at once."""
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
        """A burst of sampling, whose time its requests share."""
        running = self.sampler.running
        self.on_quantum((*running, *self.computed))
        since = time.monotonic()
        completions = self.sampler.burst()
        share = (time.monotonic() - since) / max(1, len(running))
        for request_id in running:
            self._sampling_s[request_id] += share
        return [replace(one, device_s=self._sampling_s.pop(one.request_id, 0.0)) for one in completions]

    # -- devices that training and sampling share ---------------------------------------------------------------------

    def sleep(self, phase: Phase) -> Future[Any] | None:
        """Give up the devices' memory that a phase takes. Nothing of it is under way.

        Called, as are the three below, where devices are shared (`phases`), which opens with both phases asleep and the
        sampler paused. A future that is returned is waited for.
        """

    def wake(self, phase: Phase) -> Future[Any] | None:
        """Take that memory back."""

    def pause(self) -> Future[Any] | None:
        """Let nothing more be drawn until `resume`. Samples that run keep what they have."""

    def resume(self) -> Future[Any] | None:
        """Let samples go on."""

    @cached_property
    def _phases(self) -> Phases | None:
        return Phases(self) if self.info().colocated else None

    @property
    def _demand(self) -> Demand:
        sampling = self.sampler.busy or bool(self.sampler.elsewhere)
        return Demand(self._work_queue.ready, sampling, self._work_queue.in_flight)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def begin(self, operation: ModelOperation) -> Work:
        """Begin an operation, once those before it have ended. Raises what it fails with."""
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
        """Clear the sums and the mark of a failed pass. Returns the mark."""
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
        if not self.has_model(operation.model_id):  # then there is no step to fail
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
        """Say, from any thread, that there may be something for `step` to do."""
        with self._wake:
            self._wake.notify_all()
        self.on_wake()

    def lose(self, error: BackendLost) -> None:
        """Say, from any thread, that it cannot go on: `step` raises the error, unless what is in flight says more."""
        self._lost = self._lost or error
        self.notify()

    def on_answer(self, answers: "Future[list[Any]]") -> None:
        self.notify()


class IncompleteGradients(RequestError):
    """An optimizer step that has to fail because of the gradient sums, which it has cleared."""


def _changes(operation: ModelOperation) -> bool:
    """Return True if what is computed of it changes its model."""
    return isinstance(operation, OptimStep) or (isinstance(operation, ForwardBackward) and not operation.forward_only)


def failure(operation: Operation | str, error: BaseException) -> ErrorResponse:
    """Error as the sender reads it: verbatim what is written for it, others without details, which go to the log."""
    if isinstance(error, RequestError):
        return ErrorResponse(str(error), "user")
    if isinstance(error, StorageError):
        return ErrorResponse(str(error), "server", of_storage=True)
    request_id = operation if isinstance(operation, str) else operation.request_id
    kind = "" if isinstance(operation, str) else f"{type(operation).__name__} "
    log.error("internal error (%srequest %s)", kind, request_id, exc_info=error)
    return ErrorResponse(f"internal error (request {request_id}); the server's log has the details", "server")
