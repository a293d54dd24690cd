"""Rate and concurrency limits of trajectories, for quotas of providers and sandboxes."""

import asyncio


class RateLimiter:
    """`async with limiter:` waits until another trajectory may start, in order of arrival.

    The rate limit is a token bucket with `per_second` tokens per second and the same capacity, initially full. The
    concurrency limit is a semaphore with `max_concurrent` places, released at the end.
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
        """Take a token immediately, possibly in advance, and wait until it is available."""
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
