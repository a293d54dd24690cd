"""Temporary folders that are removed after their process ends.

The process holds a lock on a file in its folder. A process that creates another folder there first removes folders
whose locks are free. The parent may be writable for other users. Folders are therefore opened without following links,
and only those of this user are emptied, through the open descriptor.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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
        with contextlib.suppress(OSError), _opened(self.path) as handle:
            _empty(handle)
            self.path.rmdir()
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


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Context with a descriptor of a folder. Raises OSError for a link and for a folder of another user."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user")
        yield handle
    finally:
        os.close(handle)


def _remove_unheld(folder: Path) -> None:
    """Remove an abandoned folder. Skips folders in use, of other users, or without a lock (new folders)."""
    with contextlib.suppress(OSError), _opened(folder) as handle:
        lock = FileLock(LOCK, flags=os.O_NOFOLLOW, folder=handle)
        try:
            if lock.take():
                _empty(handle)
                folder.rmdir()
        finally:
            lock.release()


def _empty(handle: int) -> None:
    """Remove the contents of an open folder, its lock last, so that a later process finds what cannot be removed.

    Raises OSError if something is left.
    """
    with os.scandir(handle) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries if entry.name != LOCK]
    for name, is_folder in found:
        if is_folder:
            shutil.rmtree(name, ignore_errors=True, dir_fd=handle)
        else:
            os.unlink(name, dir_fd=handle)
    if os.listdir(handle) == [LOCK]:
        os.unlink(LOCK, dir_fd=handle)
