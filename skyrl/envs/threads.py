"""Where environments do what would hold up the event loop: blocking calls in threads, model-written code in processes.

Both are bounded, so that a thousand trajectories do not start a thousand threads or processes at once.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

P = ParamSpec("P")
T = TypeVar("T")


class EnvWorkers:
    """At most `limit` threads for blocking calls, and at most one process per CPU core for code."""

    def __init__(self, limit: int = 32):
        """Run up to `limit` calls at a time (`environment.skyrl_gym.max_env_workers`). 0: on the event loop itself."""
        self.limit = limit
        self._processes: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.limit, thread_name_prefix="env")

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start `call` in a thread, once one is free; with a limit of 0 it has run when this returns."""
        if self.limit:
            return self._pool.submit(call, *args, **kwargs)
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


SHARED = EnvWorkers()
"""Of environments that are made without workers of their own."""
