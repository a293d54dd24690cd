"""Traces of a session's requests: timestamps in memory, and their conversion for https://ui.perfetto.dev and
chrome://tracing.

A model or sampler is a process. Its requests are slices. Slices on one thread do not overlap, and as few threads as
possible are used. The slice of a request is divided into the phases of the request, without gaps:

queue     until it is sent to the engine: waits for the log, its model's revival, its version, or the engine's start
batch     until the engine starts it: waits for earlier requests of its model, other tenants, or room in a batch
compute   until the engine has finished it, including written files; other requests may be computed in between
save      until its outcome is stored and available

Format: "Trace Event Format", Google, 2016 (complete events `X`, metadata events `M`; times in microseconds).
"""

import heapq
import json
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl.tinker.identity.ids import kind_of, session_of
from skyrl.tinker.results import Failure, Outcome

MAX_REQUESTS = 100_000
"""Maximum number of ended requests, about 50 MB. Above it, the older half of the largest session is dropped."""
MAX_SESSIONS = 1000
"""Maximum number of sessions. Sessions whose last request ended most recently are kept."""


@dataclass(slots=True)
class Timeline:
    """Timestamps of one request, in seconds on the monotonic clock. None: the request has not reached this phase."""

    request_id: str
    run: str
    """Model or sampler of the request. Empty: the timeline is dropped when the request ends."""
    accepted: float = field(default_factory=time.monotonic)
    sent: float | None = None
    """Time when the request was sent to the engine."""
    began: float | None = None
    """Time when the engine started the request, alone or in a batch."""
    done: float | None = None
    """Time when the engine finished the request."""
    ended: float | None = None
    """Time when the outcome was stored and available to clients."""
    outcome: str = "pending"
    """pending, answer, lost, or the category of the failure."""
    engines: int = 0
    """Number of engines that exited before they finished the request."""

    def engine_ended(self) -> None:
        """Handle an exit of the engine: unless the request is done, it waits for the next engine."""
        if self.sent is not None and self.done is None:
            self.engines += 1
            self.sent = self.began = None


class Timelines:
    """Timelines of ended requests, by session."""

    def __init__(self, max_requests: int = MAX_REQUESTS, max_sessions: int = MAX_SESSIONS):
        self._max_requests, self._max_sessions = max_requests, max_sessions
        self._sessions: OrderedDict[str, deque[Timeline]] = OrderedDict()
        self._count = 0

    def end(self, timeline: Timeline, outcome: Outcome) -> float:
        """Record the end of a request. Returns its duration in seconds."""
        timeline.ended = time.monotonic()
        timeline.outcome = outcome.category if isinstance(outcome, Failure) else type(outcome).__name__.lower()
        if timeline.run:
            self._keep(timeline)
        return timeline.ended - timeline.accepted

    def of_session(self, session_id: str) -> list[Timeline]:
        """Return the ended requests of a session, in the order of their ends."""
        return list(self._sessions.get(session_id, ()))

    def _keep(self, timeline: Timeline) -> None:
        session_id = session_of(timeline.run)
        if session_id not in self._sessions:
            self._sessions[session_id] = deque()
            if len(self._sessions) > self._max_sessions:
                self._count -= len(self._sessions.popitem(last=False)[1])
        self._sessions[session_id].append(timeline)
        self._sessions.move_to_end(session_id)
        self._count += 1
        if self._count > self._max_requests:
            most = max(self._sessions.values(), key=len)
            for _ in range((len(most) + 1) // 2):
                most.popleft()
                self._count -= 1


PIECE = 64
"""Number of requests per yielded piece of text. Encoding a piece takes a millisecond."""
PIECE_BYTES = 40_000
"""Approximate bytes of a piece."""

Event = dict[str, Any]


def text(session_id: str, timelines: Iterable[Timeline]) -> Iterator[bytes]:
    """Yield the JSON text of a trace, in pieces. Pending requests last until now.

    Args:
        session_id: Session of the requests.
        timelines: Timelines of the requests.
    """
    now = time.monotonic()
    to_unix = time.time() - now
    yield b'{"displayTimeUnit":"ms","otherData":%b,"traceEvents":[' % json.dumps({"session_id": session_id}).encode()
    lanes = _Lanes()
    requests = sorted(timelines, key=lambda one: one.accepted)
    for first in range(0, len(requests), PIECE):
        events = [event for one in requests[first : first + PIECE] for event in _of_request(one, lanes, now, to_unix)]
        piece = json.dumps(events, separators=(",", ":"))[1:-1].encode()
        yield b"," + piece if first else piece
    yield b"]}"


def phases(timeline: Timeline, now: float) -> Sequence[tuple[str, float, float]]:
    """Return (name, begin, end) of each phase that a request has reached."""
    end = now if timeline.ended is None else timeline.ended
    begins = (
        ("queue", timeline.accepted),
        ("batch", timeline.sent),
        ("compute", timeline.began),
        ("save", timeline.done),
    )
    found = [(name, begin) for name, begin in begins if begin is not None]
    ends = [*(begin for _, begin in found[1:]), end]
    return [(name, begin, end) for (name, begin), end in zip(found, ends, strict=True)]


class _Lanes:
    """Assigns a process to each model or sampler, and its requests to threads without overlaps."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._free: dict[str, list[tuple[float, int]]] = {}
        """Heap of (time from which the thread is free, thread), by model or sampler."""

    def place(self, run: str, begin: float, end: float) -> tuple[int, int, bool]:
        """Return (process, thread, True if the process is new)."""
        is_new = run not in self._processes
        process = self._processes.setdefault(run, len(self._processes) + 1)
        free = self._free.setdefault(run, [])
        if free and free[0][0] <= begin:
            thread = free[0][1]
            heapq.heapreplace(free, (end, thread))
        else:
            thread = len(free) + 1
            heapq.heappush(free, (end, thread))
        return process, thread, is_new


def _of_request(timeline: Timeline, lanes: _Lanes, now: float, to_unix: float) -> Iterator[Event]:
    parts = phases(timeline, now)
    begin, end = parts[0][1], parts[-1][2]
    process, thread, is_new = lanes.place(timeline.run, begin, end)
    place = {"pid": process, "tid": thread}
    if is_new:
        yield {"name": "process_name", "ph": "M", **place, "args": {"name": timeline.run}}
    args = {"request_id": timeline.request_id, "outcome": timeline.outcome, "engines_ended": timeline.engines}
    whole = (kind_of(timeline.request_id), begin, end)
    for category, (name, since, until), told in (
        ("request", whole, args),
        *(("phase", phase, {}) for phase in parts),
    ):
        # Both ends are rounded alike, so that a phase never sticks out of its request.
        start, stop = (round((moment + to_unix) * 1e6) for moment in (since, until))
        yield {"name": name, "cat": category, "ph": "X", "ts": start, "dur": stop - start, **place, "args": told}
