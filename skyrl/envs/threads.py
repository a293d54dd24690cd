"""Threads and processes of environments, for blocking calls and model-written code.

Both are limited, so a thousand trajectories do not start a thousand threads or processes at once. A call that never
returns occupies only its thread. When the caller gives up, the thread no longer counts towards the limit. Unlike with a
`ThreadPoolExecutor`, the process can exit without waiting for such threads.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

P = ParamSpec("P")
T = TypeVar("T")


class EnvWorkers:
    """Up to `limit` threads for blocking calls, and up to `limit` processes for code, but at most one per CPU core."""

    def __init__(self, limit: int = 32):
        """Run up to `limit` calls at a time (`environment.skyrl_gym.max_env_workers`). 0: run on the event loop."""
        self.limit = limit
        self._free = limit
        self._waiting: deque[_Call[Any]] = deque()
        self._lock = threading.Lock()
        self._processes: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start `call` in a thread as soon as the limit allows. With a limit of 0, run it now in this thread.

        A running call that is cancelled does not stop, but no longer counts towards the limit.
        """
        if self.limit:
            waiting = _Call(partial(call, *args, **kwargs), self._give_back)
            with self._lock:
                self._waiting.append(waiting)
                self._start_waiting()
            return waiting
        done: Future[T] = Future()
        try:
            done.set_result(call(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `call`.

        If the caller is cancelled, the call continues, because threads cannot be stopped.
        """
        return await asyncio.wrap_future(self.submit(partial(call, *args, **kwargs)))

    @asynccontextmanager
    async def process(self) -> AsyncIterator[None]:
        """Context in which the caller may run one process. Waits while the maximum number of processes run."""
        # A semaphore belongs to one event loop; programs and tests may run several loops in sequence.
        loop = asyncio.get_running_loop()
        slots = self._processes.setdefault(loop, asyncio.Semaphore(max(1, min(self.limit, os.cpu_count() or 1))))
        async with slots:
            yield

    def _give_back(self) -> None:
        with self._lock:
            self._free += 1
            self._start_waiting()

    def _start_waiting(self) -> None:
        """Start waiting calls in order while threads are free. The caller holds the lock."""
        while self._free and self._waiting:
            call = self._waiting.popleft()
            if call.set_running_or_notify_cancel():
                self._free -= 1
                # A daemon thread, because the interpreter joins all others at exit.
                threading.Thread(target=call.run, name="env", daemon=True).start()


class _Call(Future[T]):
    """A call that counts towards the limit until it ends or is cancelled."""

    def __init__(self, call: Callable[[], T], give_back: Callable[[], None]):
        super().__init__()
        self._call = call
        self._give_back = give_back
        self._left = threading.Lock()
        """Acquired once, when the call stops counting towards the limit."""

    def run(self) -> None:
        try:
            result = self._call()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)
        self._leave()

    def cancel(self) -> bool:
        """Cancel the call if it has not started. Returns False if it is running, as any future does.

        A running call continues, but no longer counts towards the limit.
        """
        cancelled = super().cancel()
        if self.running():
            self._leave()
        return cancelled

    def _leave(self) -> None:
        if self._left.acquire(blocking=False):
            self._give_back()


SHARED = EnvWorkers()
"""Default workers, shared by all environments that are not given others."""
