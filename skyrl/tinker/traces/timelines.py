"""Timestamps of requests, kept in memory for the most recent requests of each session."""

import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from skyrl.tinker.identity.ids import session_of
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
