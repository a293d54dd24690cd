"""The quantum loop: interleaves the training work of many models with sampling.

A subclass says how to run one operation as a generator that yields after each quantum (`run`), and how to sample
(`sampler`). The executor keeps each model's operations in order, takes turns between models, and gives sampling one
burst per step, so a short request never waits for a long one. An operation may return a `Future` for work that goes
on in the background (a file being written); it completes when the future does, while the model moves on.

One thread submits and steps. Only `wait` may be left by another: background work that ends wakes it.
"""

import dataclasses
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
    LoadSnapshot,
    ModelOperation,
    Operation,
    OptimStep,
    Rejected,
    Sample,
)
from skyrl.backends.writer import Writer
from skyrl.errors import RequestError, StorageError
from skyrl.types import ErrorResponse, GradientEffect, Result, SaveOutput

log = logging.getLogger(__name__)

Work = Generator[None, None, Result | Future[Result]]


class SamplerLoop(Protocol):
    """Continuous sampling: requests join at `add` and leave by themselves."""

    @property
    def busy(self) -> bool: ...

    @property
    def running(self) -> tuple[str, ...]:
        """Requests that the next burst may work on."""
        ...

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
        self._writer = Writer(lambda version, saved: self.on_stored(version, saved))

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

    def submit_first(self, operation: ModelOperation) -> None:
        """Queue an operation before all others of its model, none of which may have begun (`is_working_on`)."""
        assert not self.is_working_on(operation.model_id), operation
        with self._wake:
            self._queues.setdefault(operation.model_id, deque()).appendleft(operation)
            self._wake.notify_all()

    def is_working_on(self, model_id: str) -> bool:
        """Whether an operation of the model has begun and not ended, background writes aside."""
        return model_id in self._running

    def cancel(self, request_id: str) -> None:
        self.sampler.cancel(request_id)

    def abandon(self) -> list[ModelOperation]:
        """Drop all model operations that have not ended, and return them. Their models stay as they are."""
        abandoned = [operation for queue in self._queues.values() for operation in queue]
        for work in self._running.values():
            work.close()
        self._running.clear()
        self._queues.clear()
        return abandoned

    def failed_pass(self, model_id: str) -> str | None:
        """Why the model's next optimizer step has to fail: what broke a pass since the last one. None: it need not."""
        return self._failed_pass.get(model_id)

    @property
    def writing(self) -> bool:
        """Whether an operation waits for a background write."""
        return bool(self._background)

    def close(self) -> None:
        self._writer.close()

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
            self.on_quantum(self.sampler.running)
            completions += self.sampler.burst()
        return completions

    def _training_quantum(self) -> list[Completion]:
        """One quantum of the model whose turn it is, which then goes to the end of the line."""
        model_id, queue = self._queues.popitem(last=False)
        operation = queue[0]
        self.on_quantum((operation.request_id,))
        done = None
        try:
            work = self._running.get(model_id) or self._start(operation)
            self._running[model_id] = work
            next(work)
        except StopIteration as stop:
            done = stop.value
        except Exception as error:
            done = dataclasses.replace(failure(operation, error), gradients=self._effect(operation, error))
        if done is not None:
            queue.popleft()
            self._running.pop(model_id, None)
        if queue:
            self._queues[model_id] = queue
        return [] if done is None else self._complete(operation, done)

    def _start(self, operation: ModelOperation) -> Work:
        model_id = operation.model_id
        if isinstance(operation, Rejected):
            if operation.gradients == "dropped":
                self._drop_gradients(model_id)
            raise RequestError(operation.error)
        if isinstance(operation, OptimStep) and model_id in self._failed_pass:
            cause = self._drop_gradients(model_id)
            raise _IncompleteGradients(
                "optim_step: a forward_backward since the last optim_step failed, so its gradients are incomplete and "
                f"were dropped; correct the batch and send all of it again. The failure was: {cause}"
            )
        return self.run(operation)

    def _drop_gradients(self, model_id: str) -> str | None:
        """Clear the sums and the mark of a failed pass. Returns the mark."""
        self.discard_gradients(model_id)
        return self._failed_pass.pop(model_id, None)

    def _complete(self, operation: ModelOperation, result: "Result | Future[Result]") -> list[Completion]:
        if isinstance(result, Future):
            self._background[result] = operation.request_id
            result.add_done_callback(self._notify)
            return []
        if isinstance(result, ErrorResponse):
            if result.gradients == "incomplete":
                self._failed_pass.setdefault(operation.model_id, result.error)
        elif isinstance(operation, CreateModel | LoadCheckpoint | LoadSnapshot | DeleteModel):
            self._failed_pass.pop(operation.model_id, None)
        return [Completion(operation.request_id, result)]

    def _effect(self, operation: ModelOperation, error: Exception) -> GradientEffect:
        """What the failure of an operation means to its model's gradient sums."""
        if not self.has_model(operation.model_id):  # then there is no step to fail
            return "kept"
        if isinstance(operation, Rejected):
            return operation.gradients
        if isinstance(operation, ForwardBackward) and not operation.forward_only:
            return "incomplete"
        return "dropped" if isinstance(error, _IncompleteGradients) else "kept"

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

    # -- what the engine replaces to be told --------------------------------------------------------------------------

    def on_wake(self) -> None:
        """Called, from any thread, when background work has finished."""

    def on_quantum(self, request_ids: tuple[str, ...]) -> None:
        """Called before each quantum with the requests that it works on."""

    def on_stored(self, version: str, saved: SaveOutput) -> None:
        """Called, from any thread, when a version that was published with `persist=False` is on disk."""


class _IncompleteGradients(RequestError):
    """An optimizer step that has to fail because a pass before it did."""


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
