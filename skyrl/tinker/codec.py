"""Work on many bytes happens in threads, off the event loop.

What has been sent is worked on in fair order (`skyrl.utils.fairness`), by bytes: a hundred large bodies of one tenant
do not delay another's. Results, which come no faster than the engine makes them, have a thread of their own.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from skyrl.utils.fairness import Accounts

T = TypeVar("T")

LARGE_BYTES = 16 * 1024
"""Work on more bytes than this, which may take a millisecond, happens off the event loop."""

NOBODY = ""
"""The tenant of what is not known to be anybody's, as long as it has not been read on a server without keys."""

THREADS_FOR_BODIES = 2
"""Few, because the event loop waits for its turn among those that hold the interpreter."""

_FOR_BODIES = ThreadPoolExecutor(THREADS_FOR_BODIES, "bodies")
_FOR_RESULTS = ThreadPoolExecutor(1, "results")


class Bodies:
    """Those who wait to have read what they have sent. All methods are called on the event loop."""

    def __init__(self) -> None:
        self._accounts = Accounts()
        self._lines: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}
        """The turns of each tenant that waits, with their bytes. No line is empty."""
        self._free = THREADS_FOR_BODIES

    async def work(self, tenant: str, size: int, function: Callable[[], T], at_most: int = 0) -> T:
        """Call `function`, in a thread and when it is the tenant's turn if it works on many bytes.

        Args:
            tenant: Who sent them.
            size: How many they are.
            function: What to do.
            at_most: What they may grow to, if they are compressed.
        """
        if max(size, at_most) <= LARGE_BYTES:
            return function()
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        if tenant not in self._lines:
            self._accounts.enter(tenant)
        self._lines.setdefault(tenant, deque()).append((turn, max(1, size)))
        self._give_turns()
        try:
            await turn
            return await loop.run_in_executor(_FOR_BODIES, function)
        finally:
            if not turn.cancelled():
                self._free += 1
                if tenant in self._lines:
                    self._accounts.line_up(tenant)
            self._give_turns()

    def _give_turns(self) -> None:
        while self._free and self._lines:
            tenant = self._accounts.first(self._lines)
            line = self._lines[tenant]
            turn, size = line.popleft()
            if not turn.cancelled():
                self._free -= 1
                self._accounts.charge(tenant, size)
                turn.set_result(None)
            if not line:
                del self._lines[tenant]
                self._accounts.leave(tenant)


async def encoded(size: int, function: Callable[[], T]) -> T:
    """Call `function` on a result, in a thread if that is of many bytes."""
    if size <= LARGE_BYTES:
        return function()
    return await asyncio.get_running_loop().run_in_executor(_FOR_RESULTS, function)
