"""A lock on an open file: the kernel's, so it is free the moment that its holder is dead, however that ended.

The other locks here are this one, and what a holder or who waits says about it. A lock belongs to the open file: a
child process shares it if it is forked and goes on with this program, and not if it runs another one.
"""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

LOOK_S = 0.05
"""Seconds between two tries of one that waits."""
HELD = (errno.EACCES, errno.EAGAIN)
"""Errors of the kernel where another holds a lock."""


class FileLock:
    """An exclusive lock on a file, which this opens and does not take yet.

    Args:
        path: The file. It is made, and stays when the lock is gone.
        mode: Its permissions, where it is made.
        flags: How it is opened, beside reading and writing.
        of_process: The lock is the process's own: taken twice by it, not shared with forked children, and given up
            with any handle on the file that the process closes.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path, *, mode: int = 0o600, flags: int = os.O_CREAT, of_process: bool = False):
        self._lock = fcntl.lockf if of_process else fcntl.flock
        self._handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, mode)

    def take(self) -> bool:
        """Take the lock without waiting; False if another holds it.

        Raises:
            OSError: The disk cannot lock files.
        """
        try:
            self._lock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                return False
            raise
        return True

    def wait(self, patience_s: Callable[[], float], stopping: threading.Event | None = None) -> bool:
        """Take the lock as soon as it is free; False if it was not.

        Args:
            patience_s: How long to wait in all; asked after each try.
            stopping: Set when there is no use in waiting any more.
        """
        start, stopping = time.monotonic(), stopping or threading.Event()
        while not self.take():
            if time.monotonic() - start > patience_s() or stopping.is_set():
                return False
            stopping.wait(LOOK_S)
        return True

    def record(self, most: int) -> str:
        """Text that the holder has written into the file, at most so many bytes."""
        return os.pread(self._handle, most, 0).decode(errors="replace").strip()

    def write(self, record: bytes) -> None:
        """Write for others to read, over what is there."""
        os.pwrite(self._handle, record, 0)

    def release(self) -> None:
        """Let the next one have it."""
        os.close(self._handle)
