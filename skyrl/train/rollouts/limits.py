"""Limits on trajectories that begin in a second, and that run at a time: for quotas of providers and sandboxes."""

import asyncio


class RateLimiter:
    """`async with limiter:` waits until one more may begin, in the order of arrival.

    First for the rate: a bucket that gets `per_second` tokens in a second, holds as many, and is full at first. Then
    for one of `max_concurrent` places, which is given back at the end.
    """

    def __init__(self, per_second: float | None = None, max_concurrent: int | None = None):
        """Limit neither, either or both. None: no limit."""
        self._per_second = per_second
        self._tokens = per_second or 0.0
        self._filled_at: float | None = None
        self._places = None if max_concurrent is None else asyncio.Semaphore(max_concurrent)

    async def __aenter__(self) -> None:
        if self._per_second is not None:
            await self._take_token(self._per_second)
        if self._places is not None:
            await self._places.acquire()

    async def __aexit__(self, *error: object) -> None:
        if self._places is not None:
            self._places.release()

    async def _take_token(self, per_second: float) -> None:
        """Take a token at once, perhaps one that is not there yet, and wait until it is."""
        now = asyncio.get_running_loop().time()
        passed = 0.0 if self._filled_at is None else now - self._filled_at
        self._tokens = min(per_second, self._tokens + passed * per_second) - 1
        self._filled_at = now
        if self._tokens < 0:
            try:
                await asyncio.sleep(-self._tokens / per_second)
            except asyncio.CancelledError:
                self._tokens += 1
                raise
