"""Background tasks on the event loop, with logging of their failures."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks:
    """Set of background tasks. Logs an exception of a task."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run `work` in the background."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def unbroken(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which runs to its end even if the caller is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def drain(self) -> None:
        """Wait until all running tasks have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("internal error in background work", exc_info=error)


class SerialTasks:
    """Named queues of background tasks.

    Tasks of one queue run one after another, in the order in which they were added.
    """

    def __init__(self) -> None:
        self._tasks = Tasks()
        self._last: dict[str, asyncio.Task[None]] = {}

    def add(self, line: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` after all earlier tasks of this queue."""
        task = self._last[line] = self._tasks.start(self._in_turn(self._last.get(line), work))
        task.add_done_callback(lambda _: self._left(line, task))

    async def drained(self, line: str) -> None:
        """Wait until this queue is empty."""
        while (last := self._last.get(line)) is not None:
            await asyncio.wait([last])

    async def drain(self) -> None:
        """Wait until all queues are empty."""
        while self._last:
            await asyncio.wait(list(self._last.values()))

    @staticmethod
    async def _in_turn(earlier: "asyncio.Task[None] | None", work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        await work()

    def _left(self, line: str, task: "asyncio.Task[None]") -> None:
        if self._last.get(line) is task:
            del self._last[line]
