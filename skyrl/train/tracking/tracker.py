"""Metrics of a run. They are always written as JSON lines, and also sent to the configured trackers.

Errors in this module never stop training. Each tracker runs in its own thread behind a bounded queue. A tracker that
raises an exception, or whose queue is full, is reported once and disabled.
"""

import errno
import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

from skyrl.errors import StorageError
from skyrl.utils.files.atomic_folders import replace_file

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
CLOCK = "timing/unix_s"
"""Key of the time at which a row was written, in seconds since 1970. Trackers record their own."""
QUEUE_LENGTH = 256
"""Maximum number of steps that a tracker may lag behind."""


class TrackerClient(Protocol):
    """Client of one tracker. It is created, called and closed in the same thread."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step. All values are finite."""

    def finish(self) -> None:
        """Send the remaining metrics. `log` is not called afterwards."""


class Tracker:
    """Recorder of the metrics of one run.

    Args:
        folder: Folder of `metrics.jsonl`. If it has a file of an earlier run, that is renamed.
        clients: Functions that create the trackers besides the file, by name (`clients.tracker_clients`).
        resumed_step: Step from which the run resumes. None: a new run. Lines of later steps are removed from the file,
            because the run takes these steps again.
        queue_length: Maximum number of steps that a tracker may lag behind.
    """

    def __init__(
        self,
        folder: str | Path,
        clients: Mapping[str, Callable[[], TrackerClient]],
        *,
        resumed_step: int | None = None,
        queue_length: int = QUEUE_LENGTH,
    ):
        self._file = _MetricsFile(Path(folder) / METRICS_FILE, resumed_step)
        self._workers = [_Worker(name, make, queue_length) for name, make in clients.items()]

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record the metrics of a step.

        Values are Python numbers or scalars of an array library. None: missing. A step may be logged in several parts.
        Steps must not decrease.
        """
        plain = {name: _number(value) for name, value in metrics.items()}
        self._file.log(plain, step)
        finite = {name: value for name, value in plain.items() if value is not None}
        for worker in self._workers:
            worker.log(finite, step)

    def finish(self, timeout_s: float = 30.0) -> None:
        """Wait until all trackers have sent their metrics, but at most `timeout_s` seconds in total."""
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()), timeout_s)


class _Worker:
    """Thread in which one tracker runs, and its queue."""

    def __init__(self, name: str, make: Callable[[], TrackerClient], queue_length: int):
        self._name = name
        self._make = make
        self._queue: queue.Queue[tuple[Mapping[str, float], int] | None] = queue.Queue(queue_length)
        self._dropped = False
        self._reporting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._put((metrics, step))

    def end(self) -> None:
        self._put(None)

    def join(self, timeout_s: float, whole_s: float) -> None:
        self._thread.join(0 if self._dropped else timeout_s)
        if self._thread.is_alive():
            self._drop("has not sent everything after %g seconds; what it still has may be lost", whole_s)

    def _put(self, item: tuple[Mapping[str, float], int] | None) -> None:
        if self._dropped:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._drop("hangs: it is %d steps behind; the run goes on without it", self._queue.maxsize)

    def _run(self) -> None:
        try:
            client = self._make()
            while (item := self._queue.get()) is not None:
                client.log(*item)
            client.finish()
        except (Exception, SystemExit):  # training continues whatever a tracker's library raises
            self._drop("failed; the run goes on without it", exc_info=True)

    def _drop(self, message: str, *arguments: object, exc_info: bool = False) -> None:
        with self._reporting:
            first, self._dropped = not self._dropped, True
        if first:
            logger.warning(f"tracker %s {message}", self._name, *arguments, exc_info=exc_info)


class _MetricsFile:
    """File with one JSON object per step, in order. A crash during a write loses at most the last line."""

    def __init__(self, path: Path, resumed_step: int | None):
        self._path = path
        self._failed = False
        self._last: dict[str, Any] = {"step": -1}
        """Last row of the file."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resumed_step is None or not self._keep_until(resumed_step):
                set_aside(path)
        except (OSError, StorageError) as error:
            self._report(error)

    def log(self, metrics: Mapping[str, float | None], step: int) -> None:
        assert step >= self._last["step"], f"step {step} after step {self._last['step']}"
        try:
            if step == self._last["step"]:
                row = {**self._last, CLOCK: time.time(), **metrics}
                lines = self._path.read_bytes().splitlines(keepends=True)
                replace_file(self._path, b"".join(lines[:-1]) + _line(row))
            else:
                row = {"step": step, CLOCK: time.time(), **metrics}
                _append(self._path, _line(row))
            self._last = row
        except (OSError, StorageError) as error:
            self._report(error)

    def _keep_until(self, step: int) -> bool:
        """Remove the rows of steps after `step` from the file. Returns False if the file cannot be parsed as rows."""
        if not self._path.exists():
            return True
        try:
            kept = [row for row in _rows(self._path) if row["step"] <= step]
        except (ValueError, KeyError, TypeError):
            return False
        replace_file(self._path, b"".join(map(_line, kept)))
        self._last = kept[-1] if kept else self._last
        return True

    def _report(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("%s cannot be written (%s); free space or check permissions", self._path, error)


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a run's `metrics.jsonl`: "step" and metrics. Values that were not finite are None."""
    return _rows(Path(folder) / METRICS_FILE)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file. An incomplete last row is left out."""
    rows = []
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            rows.append(json.loads(line))
    return rows


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _append(path: Path, line: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(end)  # otherwise the next line would be appended to a partial one
            raise


def set_aside(path: Path) -> None:
    """Rename a file or folder of an earlier run to the first free name, such as metrics.1.jsonl or model.1."""
    if path.exists():
        taken = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in range(1, 1_000_000))
        path.rename(next(name for name in taken if not name.exists()))


def _number(value: Any) -> float | int | None:
    """Return the value as a Python number. None unless it is finite."""
    if isinstance(value, Integral):
        return int(value)
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None
