"""Memory quota for request bodies that are being read or processed, and for answers. `skyrl.utils.quota` divides it
between sharers.

Memory for a body's Content-Length is reserved before the body is read. Without a Content-Length, memory is reserved as
the body arrives. If there is not enough memory, the body is rejected unread (429), and the client retries. Small bodies
need no reservation, so that a sender of large bodies can still poll and keep its sessions alive.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Scope

from skyrl.utils.quota import Quota

MAX_BYTES = 2**30
"""Maximum total bytes of large bodies; the same limit applies to large answers."""
SMALL_BYTES = 64 * 2**10
"""Maximum size of a body that needs no reservation, in bytes."""


class BodyQuota:
    """Memory reservations by sharer.

    Args:
        what: Description for errors, a format string with `{}` for the number of bytes.
    """

    def __init__(self, what: str = "bodies of {} bytes") -> None:
        self.quota = Quota(what)

    @contextmanager
    def keep(self, sharer: str) -> Iterator["Reservation"]:
        """Create an empty reservation for a body of this sender. It is released at the end of the block."""
        kept = Reservation(self.quota, sharer)
        try:
            yield kept
        finally:
            if kept.size:
                self.quota.remove(sharer, kept.size)


class Reservation:
    """Memory reservation of one body.

    Args:
        quota: Quota that the reservation counts against.
        sharer: Sender of the body.
    """

    def __init__(self, quota: Quota, sharer: str):
        self._quota = quota
        self._sharer = sharer
        self.size = 0

    def grow_to(self, size: int) -> None:
        """Increase the reservation to `size` bytes. Raises `Busy` if that exceeds the sender's share."""
        more = size - self.size
        if size > SMALL_BYTES and more > 0:
            self._quota.check(self._sharer, more, MAX_BYTES, aside=self.size)
            self._quota.add(self._sharer, more)
            self.size = size


def announced_length(scope: Scope) -> int:
    """Return the Content-Length of a request; 0 if it has none."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    return int(length) if length.isdigit() else 0
