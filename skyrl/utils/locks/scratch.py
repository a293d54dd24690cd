"""A folder that belongs to one process and goes with it.

The process holds a lock in it, which is the kernel's: it goes with the process, however that ends. Who makes the next
folder beside it removes those whose lock nobody holds.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

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
        os.close(self._lock)


def _locked(folder: Path) -> int:
    """A handle that holds the folder's lock. The lock is held before it has its name, so none is ever seen free."""
    new = folder / f"{LOCK}.new"
    handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(new, folder / LOCK)
    except OSError:
        os.close(handle)
        raise
    return handle


def _remove_unheld(folder: Path) -> None:
    """Remove a folder that was one process's, unless that is alive or not of this user. Without a lock it is new."""
    with contextlib.suppress(OSError):
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)
