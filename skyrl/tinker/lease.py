"""Locks that say "a server uses this": held by an open file, so they are free the moment their holder is dead."""

import fcntl
import os
from pathlib import Path

from skyrl.errors import RequestError

IN_USE = "it is in use by another server; stop that one or give this one its own"


class InUse(RequestError):
    """Another process holds what we need alone."""


class Lease:
    """A lock on a file, from `take` to `release`. Child processes do not inherit it.

    Args:
        path: The file. It is made, and stays when the lock is gone.
        option: What the user would change to use another one, as "name=value", for the refusal.
        flag: That option's flag.

    Raises:
        InUse: Another process holds it.
        OSError: The file cannot be made.
    """

    def __init__(self, path: Path, option: str, flag: str):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._handle)
            raise InUse(f"{option}: {IN_USE} {flag}") from None

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let the next one have it."""
        os.close(self._handle)
