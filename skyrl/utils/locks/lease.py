"""Locks that say "a server uses this": held by an open file, so they are free the moment their holder is dead.

The file says which process holds the lock, and whether that is about to end. A server that is started while its
predecessor ends waits for it, as an init system may start it again the moment that its first process is gone.
"""

import fcntl
import logging
import os
import threading
import time
from pathlib import Path

from skyrl.errors import RequestError

log = logging.getLogger(__name__)

NOTICE_S = 3.0
"""Seconds that a holder gets to notice that its parent is dead, or that it is told to stop."""
ENDING_S = 60.0
"""Seconds that a holder which says that it is about to end gets for that."""
LOOK_S = 0.05
ENDING = "ending "
RECORD_BYTES = 64


class InUse(RequestError):
    """Another process holds what we need alone."""


def in_use(option: str, flag: str, holder: str = "") -> InUse:
    """The refusal of what another server holds."""
    who = f"another server ({holder})" if holder else "another server"
    return InUse(f"{option}: it is in use by {who}; stop that one or give this one its own {flag}")


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
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(option, flag, stopping or threading.Event())
            self._write("")
        except BaseException:
            os.close(self._handle)
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
        os.close(self._handle)

    def _take(self, option: str, flag: str, stopping: threading.Event) -> None:
        start, told = time.monotonic(), False
        while not self._taken():
            holder = os.pread(self._handle, RECORD_BYTES, 0).decode(errors="replace").strip()
            patience_s = ENDING_S if holder.startswith(ENDING) else NOTICE_S
            if time.monotonic() - start > patience_s or stopping.is_set():
                raise in_use(option, flag, holder)
            if patience_s == ENDING_S and not told:
                log.info("%s: waiting for the server before this one to end", option)
                told = True
            stopping.wait(LOOK_S)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _write(self, state: str) -> None:
        os.pwrite(self._handle, f"{state}process {os.getpid()}".ljust(RECORD_BYTES).encode(), 0)
