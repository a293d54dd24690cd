"""Results that clients wait for.

A future is made before its request is acknowledged and answered once; its answer may be read any number of times. Those
of samples live here only: finished ones are dropped when their bytes exceed a cap (the client then resubmits), the
oldest of the sharer that holds most, whose newest stays: nobody else loses anything by large answers, as long as there
are not two caps full of such newest ones. Those of training requests are stored in the database before they are
answered here, so finished ones are a cache of it and may be dropped at any time.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from skyrl.tinker.identity.ids import client_of, session_of
from skyrl.tinker.metrics.request_metrics import RequestMetrics
from skyrl.tinker.requests.completions import Completions
from skyrl.tinker.results import Answer, Lost, Outcome
from skyrl.tinker.traces.timelines import Timeline, Timelines

MAX_FINISHED_BYTES = 256 * 2**20
"""Answers kept in memory, together; up to twice as many where the sharer that holds most has a single one."""
OVERHEAD_BYTES = 1536
"""Bytes that an answer counts for beside its body."""


class PendingFuture:
    """An outcome that will come. `reason` says why it takes long, where that is known."""

    def __init__(
        self, request_id: str, tenant: str, key: tuple[str, int] | None = None, sharer: str = "", run: str = ""
    ):
        self.request_id = request_id
        self.tenant = tenant
        self.sharer = sharer or tenant
        """Sharer whose part of the memory its answer takes; see `Caller.sharer`."""
        self.key = key
        """(sampler, seq_id) of a sample: what makes a second request the same one."""
        self.reason: str | None = None
        self.outcome: Outcome | None = None
        self.timeline = Timeline(request_id, run if key is None else key[0])
        self.waits_since = self.timeline.accepted
        self.runs = False
        """True if the engine has begun with it."""
        self._done = asyncio.Event()

    def set(self, outcome: Outcome) -> None:
        """Answer everybody who waits. The first outcome stays."""
        if self.outcome is None:
            self.outcome = outcome
            self.interrupt()

    def interrupt(self) -> None:
        """Wake everybody who waits, with or without an outcome."""
        self._done.set()

    async def wait(self, timeout_s: float) -> Outcome | None:
        """The outcome, or None where it has not come within `timeout_s` seconds."""
        try:
            await asyncio.wait_for(self._done.wait(), timeout_s)
        except TimeoutError:
            return None
        return self.outcome


class Futures:
    """All futures that are pending or were answered lately.

    Args:
        metrics: Told of each from its beginning to its end.
        max_finished_bytes: See `MAX_FINISHED_BYTES`.
    """

    def __init__(self, metrics: RequestMetrics, max_finished_bytes: int = MAX_FINISHED_BYTES):
        self._metrics = metrics
        self.completions = Completions()
        """Ends of samples, for clients that wait for all of theirs at once."""
        self.timelines = Timelines()
        """Timelines of requests that have ended."""
        self._max_bytes = max_finished_bytes
        self._by_id: dict[str, PendingFuture] = {}
        self._sample_ids: dict[tuple[str, int], str] = {}
        self._finished: dict[str, dict[str, int]] = {}
        """Bytes of finished answers, by sharer and id, the oldest first."""
        self._bytes_of: Counter[str] = Counter()
        """By sharer."""
        self._finished_bytes = 0
        self._closing = False

    def add(
        self, request_id: str, tenant: str, key: tuple[str, int] | None = None, sharer: str = "", run: str = ""
    ) -> PendingFuture:
        """A new pending future. `run` is the model that a training request is of."""
        future = self._by_id[request_id] = PendingFuture(request_id, tenant, key, sharer, run)
        self._metrics.added(tenant)
        if key is not None:
            self._sample_ids[key] = request_id
        if self._closing:
            future.interrupt()
        return future

    def get(self, request_id: str) -> PendingFuture | None:
        return self._by_id.get(request_id)

    def sample_with(self, key: tuple[str, int]) -> str | None:
        """The request that came for this (sampler, seq_id) before, while it is known."""
        return self._sample_ids.get(key)

    def set(self, request_id: str, outcome: Outcome) -> None:
        """Answer a future, and drop answers that exceed the cap. Unknown ids are ignored."""
        future = self._by_id.get(request_id)
        if future is None or future.outcome is not None:
            return
        future.set(outcome)
        self._metrics.left(future.tenant, future.runs)
        self._metrics.ended(request_id, outcome, self.timelines.end(future.timeline, outcome))
        if future.key is not None:
            size = len(outcome.body) if isinstance(outcome, Answer) else None
            self.completions.add(client_of(future.key), request_id, size)
        if isinstance(outcome, Lost):
            self.drop(request_id)
            return
        size = OVERHEAD_BYTES + (len(outcome.body) if isinstance(outcome, Answer) else len(outcome.error))
        self._finished.setdefault(future.sharer, {})[request_id] = size
        self._bytes_of[future.sharer] += size
        self._finished_bytes += size
        while self._finished_bytes > self._max_bytes and (surplus := self._surplus(request_id)) is not None:
            self.drop(surplus)

    def _surplus(self, newest: str) -> str | None:
        """The answer to be dropped next, if there is one. The one that has just come stays, whatever its size."""
        for sharer, _ in self._bytes_of.most_common():
            oldest = next(iter(self._finished[sharer]))
            if len(self._finished[sharer]) == 1 and self._finished_bytes <= 2 * self._max_bytes:
                return None
            if oldest != newest:
                return oldest
        return None

    def drop(self, request_id: str) -> None:
        """Forget a future. Who waits for it keeps waiting for its outcome."""
        future = self._by_id.pop(request_id, None)
        if future is not None and future.outcome is None:
            self._metrics.left(future.tenant, future.runs)
        if future is not None and future.key is not None:
            self._sample_ids.pop(future.key, None)
            self.completions.outlive(client_of(future.key), request_id)
        if future is not None and (size := self._finished.get(future.sharer, {}).pop(request_id, 0)):
            self._finished_bytes -= size
            self._bytes_of[future.sharer] -= size
            if not self._finished[future.sharer]:
                del self._finished[future.sharer], self._bytes_of[future.sharer]

    def sent(self, request_id: str) -> None:
        """The engine has been sent this request."""
        if (future := self._by_id.get(request_id)) is not None and future.outcome is None:
            future.timeline.sent = time.monotonic()

    def begin(self, request_ids: Iterable[str]) -> None:
        """The engine works on these requests, if it did not before."""
        for request_id in request_ids:
            future = self._by_id.get(request_id)
            if future is not None and not future.runs and future.outcome is None:
                future.runs, future.timeline.began = True, time.monotonic()
                self._metrics.began(future.tenant, future.timeline.began - future.waits_since)

    def done(self, request_id: str) -> None:
        """The engine has finished this request, which has no outcome yet."""
        if (future := self._by_id.get(request_id)) is not None and future.outcome is None:
            future.timeline.done = time.monotonic()

    def timelines_of(self, session_id: str) -> list[Timeline]:
        """Timelines of a session's requests: the newest that have ended, and all that have not, as they are now."""
        pending = (future.timeline for future in self._by_id.values() if future.outcome is None)
        of_session = [replace(one) for one in pending if one.run and session_of(one.run) == session_id]
        return self.timelines.of_session(session_id) + of_session

    def engine_ended(self) -> None:
        """Nothing runs any more, and what was known of why something takes long holds no longer."""
        for future in self._by_id.values():
            future.reason = None
            if future.outcome is None:
                future.timeline.engine_ended()
            if future.runs and future.outcome is None:
                future.runs, future.waits_since = False, time.monotonic()
                self._metrics.interrupted(future.tenant)

    def close(self) -> None:
        """Let every long poll return at once, now and from now on."""
        self._closing = True
        self.completions.close()
        for future in self._by_id.values():
            future.interrupt()
