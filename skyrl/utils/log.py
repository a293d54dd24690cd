"""Logging to stderr as plain text or JSON lines, configured once per process.

The entry point of a process calls `setup_logging`, which owns the root logger. Libraries such as uvicorn propagate to
it (start uvicorn with `log_config=None`). SIGUSR1 makes a process print the stacks of its threads.
"""

import faulthandler
import json
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from skyrl.utils.console import printable

LogFormat = Literal["text", "json"]
FORMAT = "%(asctime)s %(levelname)-7s {process}%(name)s: %(message)s"
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the current HTTP request, which is added to log lines."""


def setup_logging(level: str = "info", process: str = "", style: LogFormat = "text") -> None:
    """Log from `level` ("debug", "info", "warning", "error") upward. `process` is added to each line.

    From now on, SIGUSR1 prints the stacks of all threads.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process) if style == "json" else TextLines(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # These libraries log each HTTP request or file lock at INFO.
    for name in ("httpx", "filelock", "jax", "alembic.runtime.plugins"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    if hasattr(signal, "SIGUSR1") and sys.stderr is not None:
        faulthandler.register(signal.SIGUSR1)


@contextmanager
def logged_to(path: Path, process: str = "") -> Iterator[None]:
    """Context that also appends log messages to a file, including the traceback of an exception that ends the context.

    Raises OSError if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(TextLines(process))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    except BaseException as error:
        trace = type(error), error, error.__traceback__
        handler.handle(logging.LogRecord(__name__, logging.ERROR, __file__, 0, "ended by this", (), trace))
        raise
    finally:
        root.removeHandler(handler)
        handler.close()


class TextLines(logging.Formatter):
    """Lines for people. Messages during an HTTP request end with the request's id."""

    def __init__(self, process: str = ""):
        super().__init__(FORMAT.format(process=f"[{process}] " if process else ""))

    def formatMessage(self, record: logging.LogRecord) -> str:
        request_id = REQUEST_ID.get()
        line = super().formatMessage(record)
        return printable(line if request_id is None else f"{line} (request {request_id})")


class JsonLines(logging.Formatter):
    """One JSON object per line: time (UTC, ISO 8601), level, logger, message; process, request_id, exception if any.

    `extra={"fields": {...}}` of a log call adds members.
    """

    def __init__(self, process: str = ""):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": REQUEST_ID.get(),
            "exception": self.formatException(record.exc_info) if record.exc_info else "",
        }
        found |= getattr(record, "fields", {})
        return json.dumps({name: value for name, value in found.items() if value not in (None, "")}, default=str)
