"""Temporary folders that are removed after their process ends.

The process holds a lock on a file in its folder. A process that creates another folder there first removes folders
whose locks are free.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from skyrl.utils.locks.file_lock import FileLock

LOCK = ".lock"


class ScratchFolder:
    """A new temporary folder at `path`.

    Args:
        parent: Parent folder; created if necessary.
        prefix: Prefix of the name. Only folders with this prefix are cleaned up.

    Raises:
        OSError: The folder cannot be created, written or locked.
    """

    def __init__(self, parent: Path, prefix: str):
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f"{prefix}*"):
            _remove_unheld(left)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            self._lock = _locked(self.path)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """Remove the folder with its contents. If another process still writes into it, a later process removes it."""
        _remove(self.path)
        self._lock.release()


def _locked(folder: Path) -> FileLock:
    """Take and return the lock of a new folder.

    The lock is taken before the lock file gets its final name, so other processes never find the lock free.
    """
    new = folder / f"{LOCK}.new"
    lock = FileLock(new, flags=os.O_CREAT | os.O_EXCL)
    try:
        lock.take()  # always succeeds, because the file is new
        new.rename(folder / LOCK)
    except OSError:
        lock.release()
        raise
    return lock


def _remove_unheld(folder: Path) -> None:
    """Remove an abandoned folder. Skips folders in use, of other users, or without a lock (new folders)."""
    with contextlib.suppress(OSError):
        lock = FileLock(folder / LOCK, flags=os.O_NOFOLLOW)
        try:
            if lock.take():
                _remove(folder)
        finally:
            lock.release()


def _remove(folder: Path) -> None:
    """Remove a folder, its lock last and only with everything else. A later process finds the folder by its lock."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != LOCK:
                os.unlink(entry.path)
        if os.listdir(folder) == [LOCK]:
            shutil.rmtree(folder, ignore_errors=True)
