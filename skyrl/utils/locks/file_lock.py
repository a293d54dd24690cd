"""Kernel lock on an open file. The kernel releases it when the holder ends, for whatever reason.

The other locks in this package use it, and add information about holders and waiters. A lock belongs to the open file:
a forked child shares it, but a child that executes another program does not.
"""

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from skyrl.errors import StorageError

LOOK_S = 0.05
"""Seconds between two attempts to take the lock."""
HELD = (errno.EACCES, errno.EAGAIN)
"""Kernel errors if the lock is held by another process."""


class FileLock:
    """Exclusive lock on a file. The constructor opens the file without taking the lock.

    Args:
        path: The file. It is created if necessary, and stays after the release.
        mode: Permissions of a new file.
        flags: Flags for opening the file, in addition to reading and writing.
        folder: Descriptor of the folder that `path` is relative to.
        of_process: The process owns the lock, not the open file. It may take the lock twice, forked children do not
            share it, and closing any file descriptor of the file in this process releases the lock.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        mode: int = 0o600,
        flags: int = os.O_CREAT,
        folder: int | None = None,
        of_process: bool = False,
    ):
        self._lock = fcntl.lockf if of_process else fcntl.flock
        self._handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, mode, dir_fd=folder)

    def take(self) -> bool:
        """Take the lock without waiting. Returns False if another process holds it.

        Raises:
            OSError: The disk does not support file locks.
        """
        try:
            self._lock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                return False
            raise
        return True

    def wait(self, patience_s: Callable[[], float], stopping: threading.Event | None = None) -> bool:
        """Wait for the lock. Returns False after the timeout.

        Args:
            patience_s: Returns the total timeout in seconds; called after each attempt.
            stopping: Set to stop waiting early.
        """
        start, stopping = time.monotonic(), stopping or threading.Event()
        while not self.take():
            if time.monotonic() - start > patience_s() or stopping.is_set():
                return False
            stopping.wait(LOOK_S)
        return True

    def record(self, most: int) -> str:
        """Return the text that the holder has written into the file, up to `most` bytes."""
        return os.pread(self._handle, most, 0).decode(errors="replace").strip()

    def write(self, record: bytes) -> None:
        """Write a record for other processes over the previous one."""
        os.pwrite(self._handle, record, 0)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._handle)


LOCK = ".lock"

_held: dict[Path, FileLock] = {}
"""Locks of the folders that this process has claimed. They are held until the process ends."""


def claim_folder(folder: Path) -> bool:
    """Claim a folder for this process until it ends. Creates the folder if necessary.

    Returns False if another process has claimed it. On a disk without file locks, every claim succeeds.

    Raises:
        StorageError: The folder is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.resolve() / LOCK
        if path in _held:
            return True
        lock = FileLock(path, mode=0o644, of_process=True)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror or error}; check its permissions") from error
    with contextlib.suppress(OSError):
        if not lock.take():
            lock.release()
            return False
    _held[path] = lock
    return True
