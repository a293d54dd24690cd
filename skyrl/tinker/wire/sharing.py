"""Fair sharing between senders: memory for bodies (`BodyQuota`), and threads that decode and encode (`DecodePool`).

`skyrl.utils.quota` divides the memory for request bodies that are being read or processed, and for answers. Memory for
a body's Content-Length is reserved before the body is read. Without a Content-Length, memory is reserved as the body
arrives. If there is not enough memory, the body is rejected unread (429), and the client retries. Small bodies need no
reservation, so that a sender of large bodies can still poll and keep its sessions alive.

Thread pools decode and encode large bodies off the event loop. Request bodies and JSON answers are processed in fair
order (`skyrl.utils.fairness`): a hundred large bodies of one tenant do not delay another tenant's. Work is charged by
bytes before it runs. Afterwards, its excess CPU time is charged, because a compressed body may expand by a factor of
thousands. Results of the engine are encoded in a single separate thread. This is enough, because they arrive no faster
than the engine computes them.
"""

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.types import Scope

from skyrl.utils.fairness import Accounts
from skyrl.utils.quota import Quota

MAX_BYTES = 2**30
"""Maximum total bytes of large bodies; the same limit applies to large answers."""
SMALL_BYTES = 64 * 2**10
"""Maximum size of a body that needs no reservation, in bytes."""


class BodyQuota:
    """Memory reservations by sharer.

    Args:
        what: Description for errors, a format string with `{}` for the number of bytes.
    """

    def __init__(self, what: str = "bodies of {} bytes") -> None:
        self.quota = Quota(what)

    @contextmanager
    def keep(self, sharer: str) -> Iterator["Reservation"]:
        """Create an empty reservation for a body of this sender. It is released at the end of the block."""
        kept = Reservation(self.quota, sharer)
        try:
            yield kept
        finally:
            if kept.size:
                self.quota.remove(sharer, kept.size)


class Reservation:
    """Memory reservation of one body.

    Args:
        quota: Quota that the reservation counts against.
        sharer: Sender of the body.
    """

    def __init__(self, quota: Quota, sharer: str):
        self._quota = quota
        self._sharer = sharer
        self.size = 0

    def grow_to(self, size: int) -> None:
        """Increase the reservation to `size` bytes. Raises `Busy` if that exceeds the sender's share."""
        more = size - self.size
        if size > SMALL_BYTES and more > 0:
            self._quota.check(self._sharer, more, MAX_BYTES, aside=self.size)
            self._quota.add(self._sharer, more)
            self.size = size


def announced_length(scope: Scope) -> int:
    """Return the Content-Length of a request; 0 if it has none."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    return int(length) if length.isdigit() else 0


T = TypeVar("T")

LARGE_BYTES = 16 * 1024
"""Minimum size of work that runs in a thread. Smaller work takes less than about a millisecond."""

NS_PER_BYTE = 10
"""CPU time per byte in nanoseconds that the charge by bytes covers. JSON takes more, protobuf a tenth."""

THREADS_FOR_BODIES = 2 if (os.cpu_count() or 1) > 2 else 1
"""Threads for request bodies and bulk answers. Few, because the event loop competes with them for the interpreter
lock. With two cores, one core is left for the event loop and the engine."""

_FOR_BODIES = ThreadPoolExecutor(THREADS_FOR_BODIES, "bodies")
_FOR_RESULTS = ThreadPoolExecutor(1, "results")


@dataclass(eq=False)
class _Turn:
    tenant: str
    size: int
    given: asyncio.Future[None]
    taken_ns: int = 0
    """CPU time in nanoseconds, set when the work has ended."""

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
        """Queue of waiting work of each tenant, one `_Turn` per call of `run`. No queue is empty."""
        self._turns: Counter[str] = Counter()
        """Number of waiting and running calls of each tenant. The tenant's account stays open until all of them are
        charged.
        """
        self._free = THREADS_FOR_BODIES

    async def run(self, tenant: str, size: int, function: Callable[[], T], at_most: int = 0) -> T:
        """Call `function`. Large work waits until the fair order reaches the tenant, and runs in a thread.

        Args:
            tenant: Sender or receiver of the bytes.
            size: Number of bytes.
            function: Work to do.
            at_most: Maximum number of bytes after decompression. 0: the body is not compressed.
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
        # If the caller is cancelled now, the thread stays occupied until the function returns.
        running = loop.run_in_executor(_FOR_BODIES, partial(turn.do, function))
        running.add_done_callback(lambda ended: self._end(turn, ended))
        return await asyncio.shield(running)

    async def pieces(self, tenant: str, size: int, made: Iterator[T]) -> AsyncIterator[T]:
        """Iterate over the pieces of `made` in the pool. Each piece is a separate call of `run` with `size` bytes."""
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
        """Release the thread of a call, and charge the call's excess CPU time to its tenant."""
        if ended is not None and not ended.cancelled():
            ended.exception()  # marks it as retrieved; the caller, if still there, gets it from `run`
        self._free += 1
        surplus = turn.taken_ns // NS_PER_BYTE - turn.size
        if surplus > 0:
            self._accounts.charge(turn.tenant, surplus)
        self._accounts.line_up(turn.tenant)
        self._close(turn.tenant)
        self._give_turns()

    def _close(self, tenant: str) -> None:
        """Remove one call of a tenant. After the last call, the tenant's account is closed."""
        self._turns[tenant] -= 1
        if not self._turns[tenant]:
            del self._turns[tenant]
            self._accounts.leave(tenant)


async def encoded(size: int, function: Callable[[], T]) -> T:
    """Call `function`, which encodes a result of `size` bytes. Large results are encoded in a thread."""
    if size <= LARGE_BYTES:
        return function()
    return await asyncio.get_running_loop().run_in_executor(_FOR_RESULTS, function)
