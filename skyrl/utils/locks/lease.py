"""Locks on state that a server uses. They are locks on an open file, so they are released when the holder ends.

The file names the process that holds the lock, and tells if that process is about to end. A new server waits while its
predecessor ends, because an init system may restart the server as soon as its first process has exited.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from skyrl.errors import RequestError, StorageError
from skyrl.utils.locks.file_lock import FileLock

log = logging.getLogger(__name__)

NOTICE_S = 3.0
"""Seconds to wait for a holder to notice that its parent has ended, or that it has been told to stop."""
ENDING_S = 60.0
"""Seconds to wait for a holder that is about to end."""
ENDING = "ending "
RECORD_BYTES = 64


class InUse(RequestError):
    """Another process holds the lock."""


def in_use(option: str, flag: str, holder: str = "") -> InUse:
    """Return the error for a lock that another server holds."""
    who = f"another server ({holder})" if holder else "another server"
    return InUse(f"{option}: it is in use by {who}; stop that one or give this one its own {flag}")


def holder(path: Path) -> str | None:
    """Return the process that holds the lock on a file, as text; None if there is none or the file is missing."""
    try:
        lock = FileLock(path, flags=0)
    except OSError:
        return None
    try:
        return None if lock.take() else lock.record(RECORD_BYTES).removeprefix(ENDING)
    finally:
        lock.release()


class Lease:
    """A lock on a file, held from construction to `release`. Child processes do not inherit it.

    Args:
        path: The file. It is created if necessary, and stays after the release.
        option: Option that the user can change to use another file, as "name=value", for the error.
        flag: Command line flag of the option.
        stopping: Set to stop waiting early.

    Raises:
        InUse: Another process holds the lock, and is not ending.
        OSError: The file cannot be created.
    """

    def __init__(self, path: Path, option: str, flag: str, stopping: threading.Event | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(path)
        self._option = option
        self._told = False
        try:
            if not self._lock.wait(self._patience_s, stopping):
                raise in_use(option, flag, self._holder())
            self._write("")
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def ending(self) -> None:
        """Tell waiting processes that this process is about to end."""
        self._write(ENDING)

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def _patience_s(self) -> float:
        holder = self._holder()
        patience_s = ENDING_S if holder.startswith(ENDING) else NOTICE_S
        if patience_s == ENDING_S and not self._told:
            log.info("%s: waiting for the server before this one to end", self._option)
            self._told = True
        return patience_s

    def _holder(self) -> str:
        return self._lock.record(RECORD_BYTES)

    def _write(self, state: str) -> None:
        self._lock.write(f"{state}process {os.getpid()}".ljust(RECORD_BYTES).encode())


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
