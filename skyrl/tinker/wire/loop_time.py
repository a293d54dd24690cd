"""Shares of the interpreter's time: while the event loop is behind, who has taken most of it waits at the door.

A server has one interpreter, and each request costs some of it, whatever is bounded elsewhere. What a sender's requests
take of the event loop, and of the threads for bodies, is charged to the sender and forgotten by half each second. When
the loop is behind, requests of those who have taken more than the mean wait until it has caught up; those of others
pass, so that a client that does little is answered as fast as if there were nobody else.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")

LOOK_S = 0.01
"""Between two looks at how far the loop is behind, while there are requests."""
BEHIND_S = 0.02
"""A loop that comes this much too late is behind."""
HALF_LIFE_S = 1.0
"""After which half of what was taken is forgotten."""
LET_IN = 4
"""Requests that are let in at a look that finds the loop in time."""
AT_LEAST_EVERY_S = 0.05
"""One is let in at least as often, or nobody who waits would ever be."""
FORGOTTEN_S = 1e-5
"""Who has taken less has taken nothing."""


class LoopTime:
    """What each sender has taken of the interpreter lately. All methods are called on the event loop.

    Args:
        clock: Seconds; the loop's own where there is none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._taken: dict[str, float] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """No line is empty."""
        self._behind = False
        self._watched_until = 0.0
        self._watching = False
        self._decayed_at = self._let_in_at = clock()

    def charge(self, sender: str, seconds: float) -> None:
        """A sender's request has taken so much."""
        self._taken[sender] = self._taken.get(sender, 0.0) + seconds

    async def turn(self, sender: str) -> None:
        """Return when a request of the sender may begin."""
        self._watch()
        if not self._has_to_wait(sender):
            return
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(sender, deque()).append(waiting)
        await waiting

    async def charged(self, sender: str, work: Awaitable[T]) -> T:
        """Result of `work`, what that takes of the loop's thread charged to the sender."""
        return await _Charged(work, lambda seconds: self.charge(sender, seconds))

    def look(self, late_s: float) -> None:
        """The loop came so much too late to this. Let in who may go."""
        now = self._clock()
        keep = 0.5 ** ((now - self._decayed_at) / HALF_LIFE_S)
        self._decayed_at = now
        self._taken = {name: taken * keep for name, taken in self._taken.items() if taken * keep > FORGOTTEN_S}
        self._behind = late_s > BEHIND_S
        places = int(now - self._let_in_at >= AT_LEAST_EVERY_S) if self._behind else LET_IN
        while places and self._waiting:
            sender = min(self._waiting, key=lambda name: self._taken.get(name, 0.0))
            line = self._waiting[sender]
            waiting = line.popleft()
            if not line:
                del self._waiting[sender]
            if not waiting.done():
                waiting.set_result(None)
                self._let_in_at, places = now, places - 1

    def _has_to_wait(self, sender: str) -> bool:
        if sender in self._waiting:
            return True
        mean = sum(self._taken.values()) / max(1, len(self._taken))
        return self._behind and self._taken.get(sender, 0.0) > mean

    def _watch(self) -> None:
        """Look at the loop for a while from now on."""
        self._watched_until = self._clock() + HALF_LIFE_S
        if not self._watching:
            self._watching = True
            self._look_after(LOOK_S)

    def _look_after(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds

        def look() -> None:
            self.look(loop.time() - due)
            self._watching = bool(self._waiting) or self._clock() < self._watched_until
            if self._watching:
                self._look_after(LOOK_S)

        loop.call_at(due, look)


class _Charged:
    """Awaits something in the task that it is awaited in; tells what each of its steps takes of the thread."""

    def __init__(self, work: Awaitable[Any], charge: Callable[[float], None]):
        self._work = work
        self._charge = charge

    def __await__(self) -> Generator[Any, Any, Any]:
        steps, value, error = self._work.__await__(), None, None
        while True:
            begun = time.thread_time()
            try:
                wanted = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value
            finally:
                self._charge(time.thread_time() - begun)
            try:
                value, error = (yield wanted), None
            except BaseException as thrown:
                value, error = None, thrown
