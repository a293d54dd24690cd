"""Work on many bytes happens in threads, off the event loop.

What has been sent, and what is sent as JSON, is worked on in fair order (`skyrl.utils.fairness`): a hundred large
bodies of one tenant do not delay another's. They are charged by bytes before, and for the time that they took beyond
what so many bytes are worth afterwards, because a hundred bytes may stand for a million. Results, which come no faster
than the engine makes them, have a thread of their own.
"""

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from skyrl.utils.fairness import Accounts

T = TypeVar("T")

LARGE_BYTES = 16 * 1024
"""Work on more bytes than this, which may take a millisecond, happens off the event loop."""

NS_PER_BYTE = 10
"""Nanoseconds of a thread that a byte is worth. Those of JSON take more, those of protobuf a tenth."""

THREADS_FOR_BODIES = 2 if (os.cpu_count() or 1) > 2 else 1
"""For all that clients send and ask for in bulk. Few, because the event loop waits for its turn among those that hold
the interpreter; on two cores one is the loop's and the engine's."""

_FOR_BODIES = ThreadPoolExecutor(THREADS_FOR_BODIES, "bodies")
_FOR_RESULTS = ThreadPoolExecutor(1, "results")


@dataclass(eq=False)
class _Turn:
    tenant: str
    size: int
    given: asyncio.Future[None]
    taken_ns: int = 0
    """Nanoseconds that it took of a thread, once that has ended."""

    def do(self, function: Callable[[], T]) -> T:
        begun = time.thread_time_ns()
        try:
            return function()
        finally:
            self.taken_ns = time.thread_time_ns() - begun


class DecodePool:
    """A fair pool of threads for work on large bodies and answers. All methods are called on the event loop."""

    def __init__(self) -> None:
        self._accounts = Accounts()
        self._lines: dict[str, deque[_Turn]] = {}
        """The turns that each tenant waits for. No line is empty."""
        self._turns: Counter[str] = Counter()
        """Turns that each tenant waits for or has. Its account stays open as long, so that it pays for them all."""
        self._free = THREADS_FOR_BODIES

    async def run(self, tenant: str, size: int, function: Callable[[], T], at_most: int = 0) -> T:
        """Call `function`, in a thread and when it is the tenant's turn if it works on many bytes.

        Args:
            tenant: Who sent them, or is sent them.
            size: How many they are.
            function: What to do.
            at_most: What they may grow to, if they are compressed.
        """
        if max(size, at_most) <= LARGE_BYTES:
            return function()
        loop = asyncio.get_running_loop()
        turn = _Turn(tenant, max(1, size), loop.create_future())
        if not self._turns[tenant]:
            self._accounts.enter(tenant)
        self._turns[tenant] += 1
        self._lines.setdefault(tenant, deque()).append(turn)
        self._give_turns()
        try:
            await turn.given
        except asyncio.CancelledError:
            if not turn.given.cancelled():
                self._end(turn)
            raise
        # Who leaves now leaves its thread behind, which is taken until it has ended.
        running = loop.run_in_executor(_FOR_BODIES, partial(turn.do, function))
        running.add_done_callback(lambda ended: self._end(turn, ended))
        return await asyncio.shield(running)

    async def pieces(self, tenant: str, size: int, made: Iterator[T]) -> AsyncIterator[T]:
        """Pieces that an iterator makes, each of `size` bytes as work of its own."""
        nothing = object()
        while (piece := await self.run(tenant, size, partial(next, made, nothing))) is not nothing:
            yield piece  # pyright: ignore[reportReturnType]

    def _give_turns(self) -> None:
        while self._free and self._lines:
            tenant = self._accounts.first(self._lines)
            line = self._lines[tenant]
            turn = line.popleft()
            if turn.given.cancelled():
                self._close(tenant)
            else:
                self._free -= 1
                self._accounts.charge(tenant, turn.size)
                turn.given.set_result(None)
            if not line:
                del self._lines[tenant]

    def _end(self, turn: _Turn, ended: asyncio.Future[Any] | None = None) -> None:
        """A thread is free again."""
        if ended is not None and not ended.cancelled():
            ended.exception()  # is not lost: who still waits has it, and nobody else wants it
        self._free += 1
        surplus = turn.taken_ns // NS_PER_BYTE - turn.size
        if surplus > 0:
            self._accounts.charge(turn.tenant, surplus)
        self._accounts.line_up(turn.tenant)
        self._close(turn.tenant)
        self._give_turns()

    def _close(self, tenant: str) -> None:
        """A tenant waits for one turn less, or has one less."""
        self._turns[tenant] -= 1
        if not self._turns[tenant]:
            del self._turns[tenant]
            self._accounts.leave(tenant)


async def encoded(size: int, function: Callable[[], T]) -> T:
    """Call `function` on a result, in a thread if that is of many bytes."""
    if size <= LARGE_BYTES:
        return function()
    return await asyncio.get_running_loop().run_in_executor(_FOR_RESULTS, function)
