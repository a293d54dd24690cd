"""Locks that say "a server uses this": held by an open file, so they are free the moment their holder is dead.

The file says which process holds the lock, and whether that is about to end. A server that is started while its
predecessor ends waits for it, as an init system may start it again the moment that its first process is gone.
"""

import logging
import os
import threading
from pathlib import Path

from skyrl.errors import RequestError
from skyrl.utils.locks.file_lock import FileLock

log = logging.getLogger(__name__)

NOTICE_S = 3.0
"""Seconds that a holder gets to notice that its parent is dead, or that it is told to stop."""
ENDING_S = 60.0
"""Seconds that a holder which says that it is about to end gets for that."""
ENDING = "ending "
RECORD_BYTES = 64


class InUse(RequestError):
    """Another process holds what we need alone."""


def in_use(option: str, flag: str, holder: str = "") -> InUse:
    """The refusal of what another server holds."""
    who = f"another server ({holder})" if holder else "another server"
    return InUse(f"{option}: it is in use by {who}; stop that one or give this one its own {flag}")


def holder(path: Path) -> str | None:
    """Process that holds the lock on a file, in words; None if none does, or this user has no such file."""
    try:
        lock = FileLock(path, flags=0)
    except OSError:
        return None
    try:
        return None if lock.take() else lock.record(RECORD_BYTES).removeprefix(ENDING)
    finally:
        lock.release()


class Lease:
    """A lock on a file, from the construction to `release`. Child processes do not inherit it.

    Args:
        path: The file. It is made, and stays when the lock is gone.
        option: What the user would change to use another one, as "name=value", for the refusal.
        flag: That option's flag.
        stopping: Set when there is no use in waiting any more.

    Raises:
        InUse: Another process holds it, and goes on holding it.
        OSError: The file cannot be made.
    """

    def __init__(self, path: Path, option: str, flag: str, stopping: threading.Event | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(path)
        self._option = option
        self._told = False
        try:
            if not self._lock.wait(self._patience_s, stopping):
                raise in_use(option, flag, self._holder())
            self._write("")
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def ending(self) -> None:
        """Tell who waits for the lock that this process is about to end."""
        self._write(ENDING)

    def release(self) -> None:
        """Let the next one have it."""
        self._lock.release()

    def _patience_s(self) -> float:
        holder = self._holder()
        patience_s = ENDING_S if holder.startswith(ENDING) else NOTICE_S
        if patience_s == ENDING_S and not self._told:
            log.info("%s: waiting for the server before this one to end", self._option)
            self._told = True
        return patience_s

    def _holder(self) -> str:
        return self._lock.record(RECORD_BYTES)

    def _write(self, state: str) -> None:
        self._lock.write(f"{state}process {os.getpid()}".ljust(RECORD_BYTES).encode())
