"""What backends write to disk: in one background thread, in the order in which it was handed over.

The order is a promise: when a snapshot of a model is on disk, so is everything that the model wrote before. A version
that was published at once has nobody left to tell of a full disk, so one that cannot be written is kept here and
written before the next snapshot of its model, which fails if that fails again.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from skyrl.errors import StorageError
from skyrl.types import SaveOutput
from skyrl.utils.crash_points import crash_point

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class _Unwritten:
    model_id: str
    write: Callable[[], SaveOutput]


class Writer:
    """One thread that writes. `submit`, `snapshot` and `keep_version` may be called from any other.

    Args:
        on_stored: Called in the thread with a version, once what `keep_version` was given for it is on disk.
    """

    def __init__(self, on_stored: Callable[[str, SaveOutput], None]):
        self._on_stored = on_stored
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._unwritten: dict[str, _Unwritten] = {}
        """By version, in order of publication."""
        self._lock = threading.Lock()

    def submit(self, write: Callable[..., T], *arguments: object) -> "Future[T]":
        """Call `write` after all that came before."""
        return self._thread.submit(write, *arguments)

    def keep_version(self, version: str, model_id: str, write: Callable[[], SaveOutput]) -> "Future[Exception | None]":
        """Write a version that is in use already; try again before each snapshot of its model until it is written.

        The future is done after the first time.
        """
        entry = _Unwritten(model_id, write)
        with self._lock:
            self._unwritten.pop(version, None)
            self._unwritten[version] = entry
        return self._thread.submit(self._write_version, version, entry)

    def forget_version(self, version: str) -> None:
        """The version was deleted; nobody waits for it any more."""
        with self._lock:
            self._unwritten.pop(version, None)

    def snapshot(self, model_id: str, write: Callable[[], T]) -> "Future[T]":
        """Call `write` once everything of the model is on disk. Fails with `StorageError` if something cannot be."""
        return self._thread.submit(self._write_after_versions, model_id, write)

    def close(self) -> None:
        """Finish all writes, those that failed before included."""
        for version, entry in self._left():
            self._thread.submit(self._write_version, version, entry)
        self._thread.shutdown(wait=True)

    def _write_after_versions(self, model_id: str, write: Callable[[], T]) -> T:
        for version, entry in self._left():
            if entry.model_id == model_id and (error := self._write_version(version, entry)) is not None:
                raise StorageError(f"version {version} is not on disk: {error}") from error
        return write()

    def _write_version(self, version: str, entry: _Unwritten) -> Exception | None:
        """Write a version unless it was written, deleted or replaced meanwhile. Returns why it could not be."""
        if self._unwritten.get(version) is not entry:
            return None
        crash_point("engine: version published, not written")
        try:
            saved = entry.write()
        except Exception as error:
            log.error("version %s is in memory only until it can be written: %s", version, error)
            return error
        with self._lock:
            wanted = self._unwritten.get(version) is entry
            if wanted:
                del self._unwritten[version]
        if wanted:
            self._on_stored(version, saved)
        return None

    def _left(self) -> list[tuple[str, _Unwritten]]:
        with self._lock:
            return list(self._unwritten.items())
