"""The quantum loop: interleaves the training work of many models with sampling.

A subclass says how to run one operation as a generator that yields after each quantum (`run`), and how to sample
(`sampler`). The executor keeps each model's operations in order, takes turns between models, and gives sampling one
burst per step, so a short request never waits for a long one. An operation may return a `Future` for work that goes
on in the background (a file being written); it completes when the future does, while the model moves on.

One thread submits and steps. Only `wait` may be left by another: background work that ends wakes it.
"""

import logging
import threading
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Generator
from concurrent.futures import Future
from typing import Protocol

from pydantic import BaseModel

from skyrl.backends.backend import (
    AbstractBackend,
    Completion,
    CreateModel,
    DeleteModel,
    ForwardBackward,
    LoadCheckpoint,
    ModelOperation,
    Operation,
    OptimStep,
    Rejected,
    Sample,
)
from skyrl.errors import RequestError, StorageError
from skyrl.types import ErrorResponse, Result

log = logging.getLogger(__name__)

Work = Generator[None, None, Result | Future[Result]]


class SamplerLoop(Protocol):
    """Continuous sampling: requests join at `add` and leave by themselves."""

    @property
    def busy(self) -> bool: ...

    def add(self, request: Sample) -> None:
        """Queue a request. Raises `RequestError` if it can never run."""
        ...

    def burst(self) -> list[Completion]:
        """Admit what fits, advance every running sequence, return finished requests."""
        ...

    def cancel(self, request_id: str) -> None: ...


class Executor(AbstractBackend):
    """`submit`, `step` and `cancel` on top of `run`, `discard_gradients` and a sampler."""

    sampler: SamplerLoop

    def __init__(self, base_model: str, config: BaseModel):
        super().__init__(base_model, config)
        self._queues: OrderedDict[str, deque[ModelOperation]] = OrderedDict()
        self._running: dict[str, Work] = {}
        self._background: dict[Future[Result], str] = {}
        self._failed_pass: dict[str, str] = {}
        self._wake = threading.Condition()

    @abstractmethod
    def run(self, operation: ModelOperation) -> Work:
        """Do one operation. Yield after each quantum; return its result. Raise `RequestError` if it cannot be done.

        A failure must leave the model as it was before the operation.
        """

    @abstractmethod
    def discard_gradients(self, model_id: str) -> None:
        """Clear the model's gradient sums."""

    def submit(self, operation: Operation) -> None:
        with self._wake:
            if isinstance(operation, Sample):
                try:
                    self.sampler.add(operation)
                except Exception as error:
                    self._ready.append(Completion(operation.request_id, failure(operation, error)))
            else:
                assert isinstance(operation, ModelOperation), operation
                self._queues.setdefault(operation.model_id, deque()).append(operation)
            self._wake.notify_all()

    def cancel(self, request_id: str) -> None:
        self.sampler.cancel(request_id)

    @property
    def busy(self) -> bool:
        return bool(self._queues or self._ready or self.sampler.busy or any(f.done() for f in self._background))

    def wait(self, timeout_s: float | None = None) -> bool:
        with self._wake:
            return self._wake.wait_for(lambda: self.busy, timeout_s)

    def step(self) -> list[Completion]:
        completions, self._ready = self._ready, []
        completions += self._finished_in_background()
        if self._queues:
            completions += self._training_quantum()
        if self.sampler.busy:
            completions += self.sampler.burst()
        return completions

    def _training_quantum(self) -> list[Completion]:
        """One quantum of the model whose turn it is, which then goes to the end of the line."""
        model_id, queue = self._queues.popitem(last=False)
        operation = queue[0]
        done = None
        try:
            work = self._running.get(model_id) or self._start(operation)
            self._running[model_id] = work
            next(work)
        except StopIteration as stop:
            done = stop.value
        except Exception as error:
            done = failure(operation, error)
        if done is not None:
            queue.popleft()
            self._running.pop(model_id, None)
        if queue:
            self._queues[model_id] = queue
        return [] if done is None else self._complete(operation, done)

    def _start(self, operation: ModelOperation) -> Work:
        model_id = operation.model_id
        if isinstance(operation, Rejected):
            raise RequestError(operation.error)
        if isinstance(operation, OptimStep) and model_id in self._failed_pass:
            cause = self._failed_pass.pop(model_id)
            self.discard_gradients(model_id)
            raise RequestError(
                "optim_step: a forward_backward since the last optim_step failed, so its gradients are incomplete and "
                f"were dropped; correct the batch and send all of it again. The failure was: {cause}"
            )
        return self.run(operation)

    def _complete(self, operation: ModelOperation, result: "Result | Future[Result]") -> list[Completion]:
        if isinstance(result, Future):
            self._background[result] = operation.request_id
            result.add_done_callback(self._notify)
            return []
        failed = isinstance(result, ErrorResponse)
        was_pass = isinstance(operation, ForwardBackward) and not operation.forward_only
        was_pass |= isinstance(operation, Rejected) and operation.gradients == "incomplete"
        if failed and was_pass and self.has_model(operation.model_id):  # without a model there is no step to fail
            self._failed_pass.setdefault(operation.model_id, result.error)
        if not failed and isinstance(operation, CreateModel | LoadCheckpoint | DeleteModel):
            self._failed_pass.pop(operation.model_id, None)
        return [Completion(operation.request_id, result)]

    def _finished_in_background(self) -> list[Completion]:
        completions = []
        for future in [future for future in self._background if future.done()]:
            request_id = self._background.pop(future)
            error = future.exception()
            result = future.result() if error is None else failure(request_id, error)
            completions.append(Completion(request_id, result))
        return completions

    def _notify(self, _: "Future[Result]") -> None:
        with self._wake:
            self._wake.notify_all()
        self.on_wake()

    def on_wake(self) -> None:
        """Called, from any thread, when background work has finished. The engine replaces it to interrupt its wait."""


def failure(operation: Operation | str, error: BaseException) -> ErrorResponse:
    """What the sender reads: errors that are written for it verbatim, others without details, which go to the log."""
    if isinstance(error, RequestError):
        return ErrorResponse(str(error), "user")
    if isinstance(error, StorageError):
        return ErrorResponse(str(error), "server")
    request_id = operation if isinstance(operation, str) else operation.request_id
    kind = "" if isinstance(operation, str) else f"{type(operation).__name__} "
    log.error("internal error (%srequest %s)", kind, request_id, exc_info=error)
    return ErrorResponse(f"internal error (request {request_id}); the server's log has the details", "server")
