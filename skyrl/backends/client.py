"""A backend that runs in a thread of its own, for programs that wait for many of its results at a time.

Its executor interleaves training and sampling, as it does for the Tinker engine; here, whoever awaits a result gets it
as soon as it is complete, while other requests go on.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from skyrl.backends.executor import Executor
from skyrl.backends.operations import Operation, Sample
from skyrl.errors import RequestError
from skyrl.types import ErrorResponse, Result


class BackendClient:
    """Steps a backend in a thread. Close it, or use it as a context manager; the backend is closed with it."""

    def __init__(self, backend: Executor):
        self.backend = backend
        self._inbox: deque[Callable[[], None]] = deque()
        self._futures: dict[str, Future[Result]] = {}
        self._wake = threading.Event()
        self._closing = False
        self._failure: BaseException | None = None
        backend.on_wake = self._wake.set
        self._thread = threading.Thread(target=self._run, name="backend", daemon=True)
        self._thread.start()

    def __enter__(self) -> "BackendClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def run(self, operation: Operation) -> Result:
        """Its result, or its error: `RequestError` for what is wrong with it, else `RuntimeError`.

        Operations of one model take effect in the order of these calls. A sample whose task is cancelled is dropped.
        """
        future: Future[Result] = Future()
        self._call(lambda: self._submit(operation, future))
        try:
            result = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if isinstance(operation, Sample):
                self._call(lambda: self._cancel(operation.request_id))
            raise
        if isinstance(result, ErrorResponse):
            raise RequestError(result.error) if result.status == "user" else RuntimeError(result.error)
        return result

    def drop_version(self, version: str) -> None:
        """Forget a published version, after what was asked for before."""
        self._call(lambda: self.backend.drop_version(version))

    def close(self) -> None:
        """Stop, finish background writes, and fail what is not complete."""
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._fail(RuntimeError("the backend was closed"))
        self.backend.close()

    def _call(self, call: Callable[[], None]) -> None:
        if self._failure is not None:
            raise RuntimeError("the backend has stopped") from self._failure
        self._inbox.append(call)
        self._wake.set()

    def _submit(self, operation: Operation, future: "Future[Result]") -> None:
        self._futures[operation.request_id] = future
        self.backend.submit(operation)

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
                    self._wake.wait()
                    continue
                for completion in self.backend.step():
                    future = self._futures.pop(completion.request_id, None)
                    if future is not None and future.set_running_or_notify_cancel():
                        future.set_result(completion.result)
        except BaseException as error:
            self._failure = error
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        while self._inbox:
            self._inbox.popleft()()
        for future in self._futures.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._futures.clear()
