"""Limits on the rate and the concurrency of trajectories. Providers and sandboxes may have such quotas."""

import asyncio


class RateLimiter:
    """`async with limiter:` waits until another trajectory may start. Trajectories start in order of arrival.

    The rate limit is a token bucket with `per_second` tokens per second and the same capacity, initially full. The
    concurrency limit is a semaphore with `max_concurrent` places. The end of the `async with` block releases the place.
    """

    def __init__(self, per_second: float | None = None, max_concurrent: int | None = None):
        """Create the limits. None: no such limit."""
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
        """Take a token at once. If there is none, borrow it, and wait until it would have been available."""
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
