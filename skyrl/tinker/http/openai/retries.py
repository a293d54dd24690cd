"""Answers that a retry gets again: those to requests with the header `Idempotency-Key`.

The first request with a key is served to its end, also if its client goes. A later one with the same key and body gets
the same answer, or the rest of it. Nothing is sampled twice. An error is not kept: a retry after it is a new request.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from skyrl.errors import RequestError
from skyrl.utils.quota import Quota

TIME_TO_LIVE_S = 3600.0
"""Seconds after its first request in which an answer is kept."""
MAX_BYTES = 2**28
"""Maximum memory of complete answers in bytes, divided between sharers."""
EVENT_BYTES = 512
"""Bytes that an event counts for in addition to its text."""
MAX_KEY = 255


class Kept:
    """The events of one answer, as they come."""

    def __init__(self, events: AsyncIterator[Any], body: bytes):
        self.body = hashlib.sha256(body).digest()
        self.at = time.monotonic()
        self.events: list[Any] = []
        self.bytes = 0
        self._more = asyncio.Condition()
        self.task = asyncio.create_task(self._collect(events))

    async def read(self) -> AsyncGenerator[Any, None]:
        """Yield all events, from the first. Raises the error that ended them."""
        for number in range(2**62):
            async with self._more:
                await self._more.wait_for(lambda number=number: number < len(self.events) or self.task.done())
            if number >= len(self.events):
                self.task.result()
                return
            yield self.events[number]

    async def _collect(self, events: AsyncIterator[Any]) -> None:
        try:
            async for event in events:
                self.events.append(event)
                self.bytes += EVENT_BYTES + len(str(event))
                async with self._more:
                    self._more.notify_all()
        finally:
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._end()))

    async def _end(self) -> None:
        async with self._more:
            self._more.notify_all()


class Retries:
    """Answers by the owner, path and key of their requests. They are kept in memory, and end with the server."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str, str], tuple[str, Kept]] = OrderedDict()
        """(sharer, answer), the oldest first."""
        self._bytes = Quota("answers of {} bytes")

    def answer(
        self, owner: str, sharer: str, path: str, key: str, body: bytes, begin: Callable[[], AsyncIterator[Any]]
    ) -> tuple[Kept, bool]:
        """Return the answer to a request with a key, and True if `begin` was called for it.

        Raises `RequestError` if the key was used for another body.
        """
        if not 0 < len(key) <= MAX_KEY:
            raise RequestError(f"Idempotency-Key: has {len(key)} characters; use 1 to {MAX_KEY}")
        self._tidy()
        name = owner, path, key
        found = self._kept.get(name)
        if found is not None:
            if found[1].body != hashlib.sha256(body).digest():
                raise RequestError(f"Idempotency-Key={key!r}: was used for another request; use a new key")
            return found[1], False
        kept = Kept(begin(), body)
        self._kept[name] = sharer, kept
        kept.task.add_done_callback(lambda task: self._ended(name, kept, task))
        return kept, True

    def _ended(self, name: tuple[str, str, str], kept: Kept, task: asyncio.Task[None]) -> None:
        """Account for a complete answer; forget one that failed, or for which there is no room."""
        found = self._kept.get(name)
        if found is None or found[1] is not kept:
            return
        failed = task.cancelled() or task.exception() is not None
        if failed or not self._bytes.has_room(found[0], kept.bytes, MAX_BYTES):
            del self._kept[name]
            kept.bytes = 0
        else:
            self._bytes.add(found[0], kept.bytes)

    def _tidy(self) -> None:
        limit = time.monotonic() - TIME_TO_LIVE_S
        while self._kept:
            name, (sharer, kept) = next(iter(self._kept.items()))
            if kept.at >= limit or not kept.task.done():
                return
            del self._kept[name]
            self._bytes.remove(sharer, kept.bytes)
