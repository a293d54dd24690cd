"""One process at a time in a folder.

The lock is the process's own, so that two parts of one program may claim the same folder.
"""

import contextlib
from pathlib import Path

from skyrl.errors import StorageError
from skyrl.utils.locks.file_lock import FileLock

LOCK = ".lock"

_held: dict[Path, FileLock] = {}
"""Locks of the folders that this process has claimed, until it ends."""


def claim_folder(folder: Path) -> bool:
    """Claim a folder for this process, until that ends; made if it is not there.

    Returns False if another process has it. A disk that cannot lock files gives it to everyone.

    Raises:
        StorageError: The folder cannot be written.
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
