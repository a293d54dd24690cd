"""Times of sessions' last signs of life. In memory; written to the database now and then, for those who collect."""

import time
from collections.abc import Iterable, Mapping

from sqlmodel import Session

from skyrl.tinker.database.tables import SessionRow


class Activity:
    """Sessions that were heard of since this server started. Times are unix seconds."""

    def __init__(self) -> None:
        self._started = time.time()
        self._last_seen: dict[str, float] = {}
        self._news: dict[str, float] = {}
        self._finished: set[str] = set()

    def seen(self, session_id: str) -> None:
        """A client has said something in this session."""
        self._last_seen[session_id] = self._news[session_id] = time.time()

    def finished(self, session_id: str) -> None:
        """A client has ended this session."""
        self._finished.add(session_id)

    def forget(self, session_ids: Iterable[str]) -> None:
        """Sessions that are not known any more, among other ids."""
        for session_id in session_ids:
            self._last_seen.pop(session_id, None)
            self._finished.discard(session_id)

    def is_idle(self, session_id: str, timeout_s: float) -> bool:
        """Return True if a session has ended, or has been silent for `timeout_s` seconds (-1: never)."""
        if session_id in self._finished:
            return True
        silent_s = time.time() - self._last_seen.get(session_id, self._started)
        return 0 <= timeout_s <= silent_s

    def unsaved(self) -> dict[str, float]:
        """Times at which sessions were last heard of, where those are not stored yet."""
        return dict(self._news)

    def stored(self, unsaved: Mapping[str, float]) -> None:
        """This much is in the database now."""
        for session_id, seen in unsaved.items():
            if self._news.get(session_id) == seen:
                del self._news[session_id]


def store(session: Session, last_seen: Mapping[str, float]) -> None:
    """A job of the database."""
    for session_id, seen in last_seen.items():
        if (row := session.get(SessionRow, session_id)) is not None:
            row.last_seen_at = seen
