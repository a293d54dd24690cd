"""Sleep of engines that share devices with the trainer: during training they generate nothing and free their memory.

Samples that run when sampling stops return to the queue with their delivered tokens, and resume as if their engine had
been lost. After waking, versions on engines are compared again.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from skyrl.backends.engines.protocol import Engine, EngineDown, EngineFailed, Refused

T = TypeVar("T")


class Sleep:
    """Pauses the use of engines, and puts them to sleep and wakes them.

    Args:
        lost: Called with an engine that failed to sleep or wake, and the error.
    """

    def __init__(self, lost: Callable[[Engine, EngineDown], None]):
        self._lost = lost
        self._awake, self._held = asyncio.Event(), asyncio.Event()
        self._awake.set()
        self.asleep: set[str] = set()
        """Names of engines that sleep."""

    @property
    def holds(self) -> bool:
        """True while sampling is paused."""
        return self._held.is_set()

    def hold(self) -> None:
        """Pause sampling until `let_go`."""
        self._awake.clear()
        self._held.set()

    def let_go(self) -> None:
        """Resume sampling."""
        self._held.clear()
        self._awake.set()

    async def while_awake(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run work on an engine while engines are awake. Work that is interrupted by a pause is restarted."""
        while True:
            await self._awake.wait()
            task, held = asyncio.ensure_future(work()), asyncio.ensure_future(self._held.wait())
            try:
                await asyncio.wait([task, held], return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    return task.result()
            finally:
                held.cancel()
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def fall_asleep(self, engines: Iterable[Engine]) -> None:
        """Put engines to sleep, to free their memory."""

        async def sleep(engine: Engine) -> None:
            await engine.pause("abort")
            await engine.sleep(1)
            self.asleep.add(engine.name)

        await self._with_each(engines, sleep)

    async def wake(self, engines: Iterable[Engine]) -> None:
        """Wake engines and clear their prefix caches."""

        async def wake(engine: Engine) -> None:
            await engine.wake()
            await engine.resume()
            await engine.reset_prefix_cache()
            self.asleep.discard(engine.name)

        await self._with_each(engines, wake)

    async def _with_each(self, engines: Iterable[Engine], step: Callable[[Engine], Awaitable[None]]) -> None:
        async def one(engine: Engine) -> None:
            try:
                await step(engine)
            except (EngineDown, EngineFailed, Refused) as error:
                self._lost(engine, EngineDown(f"{engine.name} cannot sleep and wake: {error}"))

        await asyncio.gather(*(one(engine) for engine in engines))
