"""Threads and processes of environments, for what would hold up the event loop: blocking calls, model-written code.

Both are bounded, so that a thousand trajectories do not start a thousand threads or processes at once. A call that
never returns costs its thread and nothing else: whoever gives up waiting for it gives its place to the next call, and
the process ends without waiting for it, as it would not with a `ThreadPoolExecutor`.
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
    """At most `limit` threads for blocking calls, and at most one process per CPU core for code."""

    def __init__(self, limit: int = 32):
        """Run up to `limit` calls at a time (`environment.skyrl_gym.max_env_workers`). 0: on the event loop itself."""
        self.limit = limit
        self._free = limit
        self._waiting: deque[_Call[Any]] = deque()
        self._lock = threading.Lock()
        self._processes: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start `call` in a thread, once one is free; with a limit of 0 it has run when this returns.

        Cancelling one that runs does not stop it, but it no longer counts towards the limit.
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
        """The result of `call`. A caller that is cancelled leaves the thread running: nothing can stop it."""
        return await asyncio.wrap_future(self.submit(partial(call, *args, **kwargs)))

    @asynccontextmanager
    async def process(self) -> AsyncIterator[None]:
        """Waits until one more process may run code."""
        # A semaphore belongs to one event loop; programs and tests may run several, one after another.
        loop = asyncio.get_running_loop()
        slots = self._processes.setdefault(loop, asyncio.Semaphore(max(1, min(self.limit, os.cpu_count() or 1))))
        async with slots:
            yield

    def _give_back(self) -> None:
        with self._lock:
            self._free += 1
            self._start_waiting()

    def _start_waiting(self) -> None:
        """Start what waits, the first first, as far as there are places. The caller holds the lock."""
        while self._free and self._waiting:
            call = self._waiting.popleft()
            if call.set_running_or_notify_cancel():
                self._free -= 1
                # A daemon: the interpreter joins all others before it ends.
                threading.Thread(target=call.run, name="env", daemon=True).start()


class _Call(Future[T]):
    """A call that holds a place from its start to its end, or until it is cancelled."""

    def __init__(self, call: Callable[[], T], give_back: Callable[[], None]):
        super().__init__()
        self._call = call
        self._give_back = give_back
        self._left = threading.Lock()
        """Held, for good, once the place is given back."""

    def run(self) -> None:
        try:
            result = self._call()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)
        self._leave()

    def cancel(self) -> bool:
        """Cancel, as any future: False if it runs already. Its place is another's then."""
        cancelled = super().cancel()
        if self.running():
            self._leave()
        return cancelled

    def _leave(self) -> None:
        if self._left.acquire(blocking=False):
            self._give_back()


SHARED = EnvWorkers()
"""Workers of environments that are made without workers of their own."""
