"""One process at a time in a folder.

The lock is the kernel's: it goes with the process, however that ends. It is the process's own, so that two parts of one
program may claim the same folder.
"""

import errno
import fcntl
import os
from pathlib import Path

from skyrl.errors import StorageError

LOCK = ".lock"

_held: dict[Path, int] = {}
"""Handles of the folders that this process has claimed. Closing one would give its folder up."""


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
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror or error}; check its permissions") from error
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(handle)
            return False
    _held[path] = handle
    return True
