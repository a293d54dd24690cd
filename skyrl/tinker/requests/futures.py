"""Futures: the results that clients wait for.

A future is created before its request is acknowledged. It is answered once, and its answer can be read any number of
times.

Answers of samples are kept only in memory. When finished answers exceed `MAX_FINISHED_BYTES`, the oldest answers of the
sharer (tenant or address, see `Caller.sharer`) with the most bytes are dropped, and the client resubmits these samples.
If this sharer has a single answer, nothing is dropped until the total exceeds twice the limit, so one large answer does
not evict the answers of other sharers.

Answers of training requests are stored in the database first. Their futures are a cache of the database and can be
dropped at any time.

Clients that wait for all of their samples at once (`retrieve_futures`) are notified of finished samples
(`Completions`). A client is a sampler together with the range of one billion seq_ids that the client counts in. Each
finished sample is an event, numbered by one ascending counter, the cursor. A poll names the last cursor that the client
has seen. The events up to this cursor are forgotten, and the later events are returned. If there are no later events,
the poll waits. Cursors start at the current time in microseconds, so a server that was started later has higher
cursors. If the clock was set back in between, cursors start above all cursors of the earlier server.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from skyrl.tinker.identity.ids import Client, client_of, session_of
from skyrl.tinker.metrics import RequestMetrics
from skyrl.tinker.results import Answer, Lost, Outcome
from skyrl.tinker.traces import Timeline, Timelines

MAX_OUTLIVED = 20_000
"""Maximum number of events that are kept although their answers have been dropped."""


@dataclass(frozen=True)
class Event:
    """The end of a sample. `size` is the number of bytes of its result; None if the sample failed."""

    cursor: int
    request_id: str
    size: int | None


@dataclass
class _Inbox:
    """Events of one client that the client has not acknowledged."""

    events: dict[str, Event] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    polls: int = 0


class Completions:
    """Events of all clients. An event is kept until its client acknowledges it.

    If the answer is dropped first, the event is kept until the answers of `MAX_OUTLIVED` further events have been
    dropped.
    """

    def __init__(self) -> None:
        self.start = self.cursor = time.time_ns() // 1000
        """Initial value of the cursor; `cursor` is the number of the last event."""
        self._inboxes: dict[Client, _Inbox] = {}
        self._outlived: OrderedDict[str, Client] = OrderedDict()
        self._closing = False

    def begin(self, start: int) -> None:
        """Start the cursor at `start`. Call before the first event."""
        self.start = self.cursor = start

    def add(self, client: Client, request_id: str, size: int | None) -> None:
        """Record that a sample is finished."""
        self.cursor += 1
        inbox = self._inboxes.setdefault(client, _Inbox())
        inbox.events[request_id] = Event(self.cursor, request_id, size)
        inbox.arrived.set()

    def drop(self, client: Client, request_id: str) -> None:
        """Forget an event."""
        if (inbox := self._inboxes.get(client)) is not None:
            inbox.events.pop(request_id, None)
            self._tidy(client, inbox)

    def outlive(self, client: Client, request_id: str) -> None:
        """Record that the answer of an event was dropped.

        Above `MAX_OUTLIVED` events without an answer, those whose answers were dropped first are forgotten.
        """
        self._outlived[request_id] = client
        while len(self._outlived) > MAX_OUTLIVED:
            oldest, its_client = self._outlived.popitem(last=False)
            self.drop(its_client, oldest)

    async def poll(self, client: Client, seen: int, timeout_s: float) -> list[Event]:
        """Return the events after the cursor `seen`, and forget earlier ones. Waits up to `timeout_s` seconds for an
        event.

        A `seen` above the current cursor comes from another server. All events are then returned.
        """
        inbox = self._inboxes.setdefault(client, _Inbox())
        if seen <= self.cursor:
            inbox.events = {name: event for name, event in inbox.events.items() if event.cursor > seen}
        inbox.polls += 1
        try:
            if not inbox.events and timeout_s > 0 and not self._closing:
                inbox.arrived.clear()
                await asyncio.wait_for(inbox.arrived.wait(), timeout_s)
        except TimeoutError:
            pass
        finally:
            inbox.polls -= 1
            self._tidy(client, inbox)
        return list(inbox.events.values())

    def close(self) -> None:
        """Make all current and future polls return at once."""
        self._closing = True
        for inbox in self._inboxes.values():
            inbox.arrived.set()

    def _tidy(self, client: Client, inbox: _Inbox) -> None:
        if not inbox.events and not inbox.polls:
            self._inboxes.pop(client, None)


MAX_FINISHED_BYTES = 256 * 2**20
"""Maximum bytes of finished answers. If the sharer with the most bytes has a single answer, twice as much is allowed.
"""
OVERHEAD_BYTES = 1536
"""Bytes that each answer counts for in addition to its body."""


class PendingFuture:
    """The future outcome of a request. `reason` says why the request takes long, if that is known."""

    def __init__(
        self, request_id: str, tenant: str, key: tuple[str, int] | None = None, sharer: str = "", run: str = ""
    ):
        self.request_id = request_id
        self.tenant = tenant
        self.sharer = sharer or tenant
        """Sharer whose memory quota the answer counts against; see `Caller.sharer`."""
        self.key = key
        """(sampler id, seq_id) of a sample; a second request with this key is a duplicate. None: a training request."""
        self.reason: str | None = None
        self.outcome: Outcome | None = None
        self.timeline = Timeline(request_id, run if key is None else key[0])
        self.waits_since = self.timeline.accepted
        self.runs = False
        """True if the engine has started the request."""
        self._done = asyncio.Event()

    def set(self, outcome: Outcome) -> None:
        """Set the outcome and wake all waiters. Later outcomes are ignored."""
        if self.outcome is None:
            self.outcome = outcome
            self.interrupt()

    def interrupt(self) -> None:
        """Wake all waiters, with or without an outcome."""
        self._done.set()

    async def wait(self, timeout_s: float) -> Outcome | None:
        """Wait for the outcome. Returns None after `timeout_s` seconds."""
        try:
            await asyncio.wait_for(self._done.wait(), timeout_s)
        except TimeoutError:
            return None
        return self.outcome


class Futures:
    """All futures that are pending or were answered recently.

    Args:
        metrics: Counters of waiting, running and finished requests.
        max_finished_bytes: See `MAX_FINISHED_BYTES`.
    """

    def __init__(self, metrics: RequestMetrics, max_finished_bytes: int = MAX_FINISHED_BYTES):
        self._metrics = metrics
        self.completions = Completions()
        """Events of finished samples, for clients that wait for all of their samples at once."""
        self.timelines = Timelines()
        """Timelines of finished requests."""
        self._max_bytes = max_finished_bytes
        self._by_id: dict[str, PendingFuture] = {}
        self._sample_ids: dict[tuple[str, int], str] = {}
        self._finished: dict[str, dict[str, int]] = {}
        """Bytes of finished answers by sharer and request id, oldest first."""
        self._bytes_of: Counter[str] = Counter()
        """Bytes of finished answers by sharer."""
        self._finished_bytes = 0
        self._closing = False

    def add(
        self, request_id: str, tenant: str, key: tuple[str, int] | None = None, sharer: str = "", run: str = ""
    ) -> PendingFuture:
        """Add a pending future. `run` is the model id of a training request."""
        future = self._by_id[request_id] = PendingFuture(request_id, tenant, key, sharer, run)
        self._metrics.added(tenant)
        if key is not None:
            self._sample_ids[key] = request_id
        if self._closing:
            future.interrupt()
        return future

    @property
    def closing(self) -> bool:
        """True once the server stops: waits end without an outcome."""
        return self._closing

    def get(self, request_id: str) -> PendingFuture | None:
        return self._by_id.get(request_id)

    def sample_with(self, key: tuple[str, int]) -> str | None:
        """Return the id of an earlier request with the same (sampler, seq_id), if it is still known."""
        return self._sample_ids.get(key)

    def set(self, request_id: str, outcome: Outcome) -> None:
        """Set the outcome of a future, and drop answers above the memory limit. Unknown ids are ignored."""
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
        """Return the id of the next answer to drop, or None. The answer `newest` is never dropped."""
        for sharer, _ in self._bytes_of.most_common():
            oldest = next(iter(self._finished[sharer]))
            if len(self._finished[sharer]) == 1 and self._finished_bytes <= 2 * self._max_bytes:
                return None
            if oldest != newest:
                return oldest
        return None

    def drop(self, request_id: str) -> None:
        """Forget a future. Current waiters keep waiting for its outcome."""
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
        """Record that a request was sent to the engine."""
        if (future := self._by_id.get(request_id)) is not None and future.outcome is None:
            future.timeline.sent = time.monotonic()

    def begin(self, request_ids: Iterable[str]) -> None:
        """Record that the engine works on these requests."""
        for request_id in request_ids:
            future = self._by_id.get(request_id)
            if future is not None and not future.runs and future.outcome is None:
                future.runs, future.timeline.began = True, time.monotonic()
                self._metrics.began(future.tenant, future.timeline.began - future.waits_since)

    def done(self, request_id: str) -> None:
        """Record that the engine has finished a request whose outcome is not stored yet."""
        if (future := self._by_id.get(request_id)) is not None and future.outcome is None:
            future.timeline.done = time.monotonic()

    def timelines_of(self, session_id: str) -> list[Timeline]:
        """Timelines of a session's requests: the most recent finished ones, and copies of all pending ones."""
        pending = (future.timeline for future in self._by_id.values() if future.outcome is None)
        of_session = [replace(one) for one in pending if one.run and session_of(one.run) == session_id]
        return self.timelines.of_session(session_id) + of_session

    def engine_ended(self) -> None:
        """Handle an engine exit: no request is running, and known reasons for delays no longer hold."""
        for future in self._by_id.values():
            future.reason = None
            if future.outcome is None:
                future.timeline.engine_ended()
            if future.runs and future.outcome is None:
                future.runs, future.waits_since = False, time.monotonic()
                self._metrics.interrupted(future.tenant)

    def close(self) -> None:
        """Make all current and future long polls return at once."""
        self._closing = True
        self.completions.close()
        for future in self._by_id.values():
            future.interrupt()
