"""Room for the bodies of requests that are being read or worked on, shared between their senders as in `quota`; and for
answers, shared between those who asked for them.

It is asked for before a body is read, by what is announced, or by what has come of a body that announces nothing. A
body that finds none is turned away unread (429), which clients send again. Small bodies always find room, so that a
sender of large ones can still poll and keep its sessions.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Scope

from skyrl.utils.quota import Quota

MAX_BYTES = 2**30
"""Bytes of all large bodies together, and of all large answers."""
SMALL_BYTES = 64 * 2**10
"""Largest body that needs no room."""


class BodyQuota:
    """Holders of the room, and how much each has.

    Args:
        what: Is held, with braces for its bytes.
    """

    def __init__(self, what: str = "bodies of {} bytes") -> None:
        self.quota = Quota(what)

    @contextmanager
    def keep(self, sharer: str) -> Iterator["Reservation"]:
        """Room for a body of a sender, none at first, until the end of the block."""
        kept = Reservation(self.quota, sharer)
        try:
            yield kept
        finally:
            if kept.size:
                self.quota.remove(sharer, kept.size)


class Reservation:
    """Room for one body.

    Args:
        quota: What it is a part of.
        sharer: The body's sender.
    """

    def __init__(self, quota: Quota, sharer: str):
        self._quota = quota
        self._sharer = sharer
        self.size = 0

    def grow_to(self, size: int) -> None:
        """Make room for so many bytes in all. Raises `Busy` if there is none beside the sender's other bodies."""
        more = size - self.size
        if size > SMALL_BYTES and more > 0:
            self._quota.check(self._sharer, more, MAX_BYTES, aside=self.size)
            self._quota.add(self._sharer, more)
            self.size = size


def announced_length(scope: Scope) -> int:
    """A request's Content-Length; 0 where it has none."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    return int(length) if length.isdigit() else 0
