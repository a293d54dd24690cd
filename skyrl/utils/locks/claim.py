"""Exclusive use of a folder by one process.

The lock belongs to the process, so two parts of one program may claim the same folder.
"""

import contextlib
from pathlib import Path

from skyrl.errors import StorageError
from skyrl.utils.locks.file_lock import FileLock

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
