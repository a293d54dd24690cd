"""One engine at a time in a folder of checkpoints, so that one that is about to end cannot write beside the next.

The lock is the kernel's: it goes with the process, however that ends.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from skyrl.errors import StorageError

NAME = ".engine.lock"
PATIENCE_S = 20.0
LOOK_S = 0.05


@contextlib.contextmanager
def engine_lock(folder: Path, progress: Callable[[str], None], patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold the folder's lock. Waits for one that is about to end.

    Raises:
        StorageError: Another engine goes on using the folder, or the folder cannot be written.
    """
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}; check its permissions") from error
    try:
        if not _taken(lock):
            progress("waiting for the engine before this one to end")
            _wait(lock, path, patience_s)
        yield
    finally:
        os.close(lock)


def _wait(lock: int, path: Path, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not _taken(lock):
        if time.monotonic() >= deadline:
            raise StorageError(
                f"{path} is held by another engine: checkpoints_base={path.parent} is in use by another server; stop "
                "that one, or name another folder"
            )
        time.sleep(LOOK_S)


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
