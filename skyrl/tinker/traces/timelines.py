"""Moments in the life of requests, kept in memory for the newest of each session."""

import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from skyrl.tinker.identity.ids import session_of
from skyrl.tinker.results import Failure, Outcome

MAX_REQUESTS = 100_000
"""Ended requests that are kept in all, some 50 MB. Past that the session with most of them loses its older half."""
MAX_SESSIONS = 1000
"""Sessions of which any are kept: those of which a request has ended last."""


@dataclass(slots=True)
class Timeline:
    """Moments of one request, in seconds on the monotonic clock; None: it did not come so far."""

    request_id: str
    run: str
    """Model or sampler that it is of; empty: not to be kept."""
    accepted: float = field(default_factory=time.monotonic)
    sent: float | None = None
    """The engine has it."""
    began: float | None = None
    """The engine computes it, alone or in a batch."""
    done: float | None = None
    """The engine has finished it."""
    ended: float | None = None
    """Its outcome is stored, and answered to whoever asks."""
    outcome: str = "pending"
    """pending, answer, lost, or the category of its failure."""
    engines: int = 0
    """Engines that ended before they had finished it."""

    def engine_ended(self) -> None:
        """It waits for another engine, unless it is done."""
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
        """A request has ended. Returns the seconds that it took."""
        timeline.ended = time.monotonic()
        timeline.outcome = outcome.category if isinstance(outcome, Failure) else type(outcome).__name__.lower()
        if timeline.run:
            self._keep(timeline)
        return timeline.ended - timeline.accepted

    def of_session(self, session_id: str) -> list[Timeline]:
        """Requests of a session, the first that ended first."""
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
