"""Exclusive use of a checkpoint folder by one engine, so an ending engine cannot write together with its successor."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from skyrl.errors import StorageError
from skyrl.utils.locks.file_lock import FileLock

NAME = ".engine.lock"
PATIENCE_S = 20.0


@contextlib.contextmanager
def engine_lock(folder: Path, progress: Callable[[str], None], patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Context that holds the folder's lock. Waits for an engine that is about to end.

    Raises:
        StorageError: Another engine keeps using the folder, or the folder is not writable.
    """
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, mode=0o644)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}; check its permissions") from error
    try:
        if not lock.take():
            progress("waiting for the engine before this one to end")
            if not lock.wait(lambda: patience_s):
                raise StorageError(
                    f"{path} is held by another engine: checkpoints_base={path.parent} is in use by another server; "
                    "stop that one, or name another folder"
                )
        yield
    finally:
        lock.release()
