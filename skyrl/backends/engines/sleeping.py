"""Sleep of engines that share their devices with the trainer: while it trains they draw nothing, and give up memory.

Samples that run when the devices change hands go back to the line, with the tokens that were delivered, and are gone on
with as if their engine had been lost. Whatever an engine had before it slept is compared again after that.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from skyrl.backends.engines.protocol import Engine, EngineDown, EngineFailed, Refused

T = TypeVar("T")


class Sleep:
    """Says whether engines may be used now, and hands their devices over.

    Args:
        lost: Called with an engine that cannot be put to sleep, or woken, and why.
    """

    def __init__(self, lost: Callable[[Engine, EngineDown], None]):
        self._lost = lost
        self._awake, self._held = asyncio.Event(), asyncio.Event()
        self._awake.set()
        self.asleep: set[str] = set()
        """Names of engines that sleep."""

    @property
    def holds(self) -> bool:
        """True while nothing may be drawn."""
        return self._held.is_set()

    def hold(self) -> None:
        """Let nothing be drawn until `let_go`."""
        self._awake.clear()
        self._held.set()

    def let_go(self) -> None:
        """Let samples be drawn."""
        self._held.clear()
        self._awake.set()

    async def while_awake(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something with an engine while engines may be used. What is interrupted by their sleep begins anew."""
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
        """Let engines give up their memory."""

        async def sleep(engine: Engine) -> None:
            await engine.pause("abort")
            await engine.sleep(1)
            self.asleep.add(engine.name)

        await self._with_each(engines, sleep)

    async def wake(self, engines: Iterable[Engine]) -> None:
        """Let engines take it back, and forget what they have cached."""

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
