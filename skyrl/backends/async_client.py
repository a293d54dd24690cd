"""A backend that runs in a separate thread, for programs that wait for many of its results at the same time.

Its executor interleaves training and sampling, as it does for the Tinker engine. Callers get each result as soon as it
is complete, while other requests continue.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from skyrl.backends.backend import AbstractBackend
from skyrl.backends.operations import Operation, Progress, Sample
from skyrl.errors import BackendStopped, RequestError, StorageError
from skyrl.types import ErrorResponse, Result

log = logging.getLogger(__name__)


class BackendClient:
    """Runs a backend in a thread. Close it, or use it as a context manager; this also closes the backend."""

    def __init__(self, backend: AbstractBackend):
        self.backend = backend
        self._inbox: deque[Callable[[], None]] = deque()
        """Calls for the thread to make between two steps."""
        self._futures: dict[str, Future[Result]] = {}
        self._listeners: dict[str, Callable[[Progress], None]] = {}
        """Receivers of the new tokens of samples, by request."""
        self._wake = threading.Event()
        self._closing = False
        self._end: BaseException | None = None
        """Reason why the client has stopped, if it has."""
        self._lock = threading.Lock()
        """Lock of submissions and of `_end`, so that nothing is submitted after `_end` is set."""
        backend.on_wake = self._wake.set
        backend.on_progress = self._progress
        self._thread = threading.Thread(target=self._run, name="backend", daemon=True)
        self._thread.start()

    def __enter__(self) -> "BackendClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def run(self, operation: Operation, on_tokens: Callable[[Progress], None] | None = None) -> Result:
        """Run an operation and return its result. `on_tokens` gets the tokens of a sample that reports progress, in the
        backend's thread.

        Operations of one model take effect in the order of these calls. A sample whose task is cancelled is dropped.
        Raises `RequestError` for an invalid operation, `StorageError`, `RuntimeError`, or `BackendStopped`.
        """
        if on_tokens is not None:
            self._listeners[operation.request_id] = on_tokens
        try:
            return await self._outcome(operation, self._submitted(operation))
        finally:
            self._listeners.pop(operation.request_id, None)

    def begin(self, operation: Operation) -> "asyncio.Task[Result]":
        """Start an operation like `run`, and return an awaitable. This call fixes its position in the order."""
        return asyncio.ensure_future(self._outcome(operation, self._submitted(operation)))

    def _submitted(self, operation: Operation) -> "Future[Result]":
        future: Future[Result] = Future()
        self._call(lambda: self.backend.submit(operation), (operation.request_id, future))
        return future

    async def _outcome(self, operation: Operation, future: "Future[Result]") -> Result:
        try:
            result = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if isinstance(operation, Sample) and self._end is None:
                self._inbox.append(lambda: self._cancel(operation.request_id))
                self._wake.set()
            raise
        if isinstance(result, ErrorResponse):
            raise _error(result)
        return result

    def drop_version(self, version: str) -> None:
        """Forget a published version, after all earlier operations."""
        self._call(lambda: self.backend.drop_version(version))

    def close(self) -> None:
        """Stop: fail unfinished operations and finish background writes. Later operations fail at once."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._stop(RuntimeError("the client was closed"))
        self.backend.close()

    def _call(self, call: Callable[[], None], *futures: tuple[str, "Future[Result]"]) -> None:
        with self._lock:
            if self._end is not None:
                raise _stopped(self._end)
            self._futures.update(futures)
            self._inbox.append(call)
        self._wake.set()

    def _progress(self, progress: Progress) -> None:
        if (listener := self._listeners.get(progress.request_id)) is not None:
            listener(progress)

    def _cancel(self, request_id: str) -> None:
        if self._futures.pop(request_id, None) is not None:
            self.backend.cancel(request_id)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.clear()
                while self._inbox:
                    self._inbox.popleft()()
                if not self.backend.busy:
                    self._wake.wait(self.backend.time_left())
                    if not self.backend.busy:
                        continue
                for completion in self.backend.step():
                    future = self._futures.pop(completion.request_id, None)
                    if future is not None and future.set_running_or_notify_cancel():
                        future.set_result(completion.result)
        except BaseException as error:
            log.exception("the backend has stopped")
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        """Stop accepting operations, and fail all waiting callers with the reason."""
        with self._lock:
            self._end = self._end or error
        self._inbox.clear()
        for future in self._futures.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(_stopped(self._end))
        self._futures.clear()


def _error(failed: ErrorResponse) -> Exception:
    if failed.status == "user":
        return RequestError(failed.error)
    return StorageError(failed.error) if failed.of_storage else RuntimeError(failed.error)


def _stopped(why: BaseException) -> BackendStopped:
    """Create a separate error for each caller, because tracebacks are added to it."""
    error = BackendStopped(f"the backend has stopped: {why or type(why).__name__}")
    error.__cause__ = why
    return error
