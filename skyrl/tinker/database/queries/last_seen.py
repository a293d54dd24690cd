"""Last activity of sessions. It is kept in memory, and periodically written to the database for retention."""

import time
from collections.abc import Iterable, Mapping

from sqlmodel import Session

from skyrl.tinker.database.tables import SessionRow


class Activity:
    """Activity of sessions since this server started. Times are Unix seconds."""

    def __init__(self) -> None:
        self._started = time.time()
        self._last_seen: dict[str, float] = {}
        self._news: dict[str, float] = {}
        self._finished: set[str] = set()

    def seen(self, session_id: str) -> None:
        """Record that a session's client was active."""
        self._last_seen[session_id] = self._news[session_id] = time.time()

    def finished(self, session_id: str) -> None:
        """Record that a client has ended a session."""
        self._finished.add(session_id)

    def forget(self, session_ids: Iterable[str]) -> None:
        """Forget sessions that were removed. Other ids are ignored."""
        for session_id in session_ids:
            self._last_seen.pop(session_id, None)
            self._finished.discard(session_id)

    def is_idle(self, session_id: str, timeout_s: float) -> bool:
        """Return True if a session has ended, or was inactive for `timeout_s` seconds (-1: never)."""
        if session_id in self._finished:
            return True
        silent_s = time.time() - self._last_seen.get(session_id, self._started)
        return 0 <= timeout_s <= silent_s

    def unsaved(self) -> dict[str, float]:
        """Return the times of activity that are not in the database yet, by session."""
        return dict(self._news)

    def stored(self, unsaved: Mapping[str, float]) -> None:
        """Record that these times are in the database now."""
        for session_id, seen in unsaved.items():
            if self._news.get(session_id) == seen:
                del self._news[session_id]


def store(session: Session, last_seen: Mapping[str, float]) -> None:
    """Store times of activity. A job of the database."""
    for session_id, seen in last_seen.items():
        if (row := session.get(SessionRow, session_id)) is not None:
            row.last_seen_at = seen
