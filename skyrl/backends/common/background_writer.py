"""Background writes to disk and reads from it, in threads. Writes of one model run in order of submission.

The order gives two guarantees. When a snapshot of a model is on disk, so are all its earlier writes. A read of a folder
sees all earlier writes to this folder, by any model. Otherwise writes are independent: a model with slow writes
occupies one thread. For a version that was published with `persist=False`, no request is left that could report a full
disk. Such a version stays in memory and is written before the next snapshot of its model, which fails if this write
fails again.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from skyrl.errors import StorageError
from skyrl.types import SaveOutput
from skyrl.utils.failpoints import crash_point
from skyrl.utils.files.object_store import is_url

log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 4
"""Number of models that write concurrently; number of concurrent reads."""
LARGE = 2
"""Threads, out of `THREADS`, for models with base weights of their own. Requests to buckets, which may block for
minutes, have separate threads, too."""


@dataclass(eq=False)
class _Unwritten:
    model_id: str
    path: str
    write: Callable[[], SaveOutput]
    nbytes: int
    large: bool
    failure: Exception | None = None
    """Reason why the write failed; None while it is in progress."""


class Writer:
    """Threads that write and read. All methods except `close` and `wait` return at once, and may be called from any
    thread.

    Args:
        on_stored: Called, in one of the threads, when a version passed to `keep_version` is on disk.
    """

    def __init__(self, on_stored: Callable[[str, SaveOutput], None]):
        self._on_stored = on_stored
        self._writers = ThreadPoolExecutor(THREADS - LARGE, thread_name_prefix="writer")
        self._large = ThreadPoolExecutor(LARGE, thread_name_prefix="large-writer")
        self._readers = ThreadPoolExecutor(THREADS, thread_name_prefix="reader")
        self._senders = ThreadPoolExecutor(THREADS, thread_name_prefix="sender")
        self._fetchers = ThreadPoolExecutor(THREADS, thread_name_prefix="fetcher")
        self._last: dict[tuple[str, str], Future[Any]] = {}
        """Last submitted write, for each ("model", id) and each ("folder", path)."""
        self._unwritten: dict[str, _Unwritten] = {}
        """Unwritten versions, in order of publication."""
        self._pending: dict[Future[Any], tuple[str, int]] = {}
        """Model of each unfinished write, and the bytes that it keeps in memory."""
        self._next: Future[None] | None = None
        """Future for the next change of unwritten data, if `next_change` was called."""
        self._lock = threading.Lock()

    def submit(
        self, model_id: str, path: str, write: Callable[[], T], nbytes: int = 0, large: bool = False
    ) -> "Future[T]":
        """Write data of a model to the folder `path`, after all earlier writes of the model or to the folder.

        Meanwhile, `nbytes` count as `unwritten_bytes`. `large` writes do not delay small ones.
        """
        lines, writing = [("model", model_id), _folder(path)], Future[T]()
        with self._lock:
            before = self._before(lines)
            self._last |= dict.fromkeys(lines, writing)
            self._pending |= {writing: (model_id, nbytes)} if nbytes else {}
        writing.add_done_callback(partial(self._forget, lines))
        threads = self._senders if is_url(path) else self._large if large else self._writers
        _after(before, threads, write, writing)
        return writing

    def read(self, path: str, read: Callable[[], T]) -> "Future[T]":
        """Read the folder `path`, after all earlier writes to it by any model."""
        reading = Future[T]()
        with self._lock:
            before = self._before([_folder(path)])
        _after(before, self._fetchers if is_url(path) else self._readers, read, reading)
        return reading

    def keep_version(
        self,
        version: str,
        model_id: str,
        path: str,
        write: Callable[[], SaveOutput],
        nbytes: int = 0,
        large: bool = False,
    ) -> "Future[Exception | None]":
        """Write a version that is already in use, with a retry before each snapshot of its model.

        The future is done after the first attempt. `nbytes` count as `unwritten_bytes` until the version is written.
        """
        entry = _Unwritten(model_id, path, write, nbytes, large)
        with self._lock:
            self._unwritten.pop(version, None)
            self._unwritten[version] = entry
        return self._submit_version(version, entry)

    def forget_version(self, version: str) -> None:
        """Stop writing a version that was deleted."""
        with self._lock:
            self._unwritten.pop(version, None)
        self._changed()

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of data in memory that are not on disk yet."""
        with self._lock:
            pending = sum(nbytes for _, nbytes in self._pending.values())
            return pending + sum(entry.nbytes for entry in self._unwritten.values())

    def has_unwritten(self, model_id: str) -> bool:
        """Return True if this model has unwritten data."""
        with self._lock:
            versions = {entry.model_id for entry in self._unwritten.values()}
            return model_id in versions.union(model for model, _ in self._pending.values())

    @property
    def trying(self) -> bool:
        """True if a write of unwritten data is in progress."""
        with self._lock:
            return bool(self._pending) or any(entry.failure is None for entry in self._unwritten.values())

    @property
    def failure(self) -> Exception | None:
        """Reason why some data could not be written; None if no write has failed."""
        return next((entry.failure for _, entry in self._left() if entry.failure is not None), None)

    def next_change(self) -> "Future[None]":
        """Future that is done when unwritten data are written, fail, or are no longer needed."""
        with self._lock:
            self._next = self._next or Future()
            return self._next

    def try_again(self) -> None:
        """Retry failed writes."""
        for version, entry in self._left():
            if entry.failure is not None:
                entry.failure = None
                self._submit_version(version, entry)

    def snapshot(self, model_id: str, path: str, write: Callable[[], T], large: bool = False) -> "Future[T]":
        """Call `write` when all earlier data of the model are on disk.

        The future fails with `StorageError` if these data cannot be written.
        """
        return self.submit(model_id, path, partial(self._write_after_versions, model_id, write), large=large)

    def wait(self) -> None:
        """Wait until all submitted data are written or have failed."""
        while True:
            with self._lock:
                writings = set(self._last.values())
            if not writings:
                return
            wait(writings)

    def close(self) -> None:
        """Finish all writes, including retries of failed ones."""
        for version, entry in self._left():
            self._submit_version(version, entry)
        self.wait()
        with self._lock:
            self._unwritten.clear()
        self._writers.shutdown(wait=True)
        self._large.shutdown(wait=True)
        self._senders.shutdown(wait=True)
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._fetchers.shutdown(wait=True, cancel_futures=True)

    def _changed(self) -> None:
        with self._lock:
            waited_for, self._next = self._next, None
        if waited_for is not None:
            waited_for.set_result(None)

    def _before(self, lines: Iterable[tuple[str, str]]) -> list[Future[Any]]:
        return [self._last[line] for line in lines if line in self._last]

    def _forget(self, lines: list[tuple[str, str]], writing: Future[Any]) -> None:
        with self._lock:
            self._pending.pop(writing, None)
            for line in lines:
                if self._last.get(line) is writing:
                    del self._last[line]
        self._changed()

    def _submit_version(self, version: str, entry: _Unwritten) -> "Future[Exception | None]":
        write = partial(self._write_version, version, entry)
        return self.submit(entry.model_id, entry.path, write, large=entry.large)

    def _write_after_versions(self, model_id: str, write: Callable[[], T]) -> T:
        for version, entry in self._left():
            if entry.model_id == model_id and (error := self._write_version(version, entry)) is not None:
                raise StorageError(f"version {version} is not on disk: {error}") from error
        return write()

    def _write_version(self, version: str, entry: _Unwritten) -> Exception | None:
        """Write a version unless it was written, deleted or replaced meanwhile. Returns the reason of a failure."""
        if self._unwritten.get(version) is not entry:
            return None
        crash_point("engine: version published, not written")
        try:
            saved = entry.write()
        except Exception as error:
            log.error("version %s is in memory only until it can be written: %s", version, error)
            entry.failure = error
            self._changed()
            return error
        with self._lock:
            wanted = self._unwritten.get(version) is entry
            if wanted:
                del self._unwritten[version]
        self._changed()
        if wanted:
            self._on_stored(version, saved)
        return None

    def _left(self) -> list[tuple[str, _Unwritten]]:
        with self._lock:
            return list(self._unwritten.items())


def _folder(path: str) -> tuple[str, str]:
    return "folder", os.path.abspath(path)


def _after(before: list[Future[Any]], threads: ThreadPoolExecutor, call: Callable[[], T], outcome: "Future[T]") -> None:
    """Call a function in one of the threads when all of `before` have ended. No thread blocks meanwhile."""
    if before:
        before[0].add_done_callback(lambda _: _after(before[1:], threads, call, outcome))
        return
    try:
        threads.submit(_settle, call, outcome)
    except RuntimeError as closed:
        outcome.set_exception(closed)


def _settle(call: Callable[[], T], outcome: "Future[T]") -> None:
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)
