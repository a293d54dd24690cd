"""A folder that belongs to one process and goes with it.

The process holds a lock in it. Who makes the next folder beside it removes those whose lock nobody holds.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from skyrl.utils.locks.file_lock import FileLock

LOCK = ".lock"


class ScratchFolder:
    """A new folder; `path` is where it is.

    Args:
        parent: Where it is made; made, too, if it is not there.
        prefix: What its name begins with. Folders of that prefix, and only those, are looked at.

    Raises:
        OSError: It cannot be made, written or locked.
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
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def _locked(folder: Path) -> FileLock:
    """The folder's lock, held. It is taken before the file has its name, so none is ever seen free."""
    new = folder / f"{LOCK}.new"
    lock = FileLock(new, flags=os.O_CREAT | os.O_EXCL)
    try:
        lock.take()  # which nobody else has, as it has just been made
        new.rename(folder / LOCK)
    except OSError:
        lock.release()
        raise
    return lock


def _remove_unheld(folder: Path) -> None:
    """Remove a folder that was one process's, unless that is alive or not of this user. Without a lock it is new."""
    with contextlib.suppress(OSError):
        lock = FileLock(folder / LOCK, flags=os.O_NOFOLLOW)
        try:
            if lock.take():
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            lock.release()
