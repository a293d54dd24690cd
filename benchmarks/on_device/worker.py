"""Process of a group: runs the cases that it receives, one after the other, and returns their figures.

It leads a separate session, so that it can be killed with all its descendants. It ends with its driver, even if the
driver is killed. Its output goes to a log, whose end the driver shows if a case fails. It makes no decisions: after an
exception, it would run the next case too.
"""

import faulthandler
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

LONGEST_ERROR = 400
"""Maximum characters of an error in one line. XLA's messages have pages, which are in the log."""


class Answer(NamedTuple):
    """End of a case, as reported by its process."""

    ok: bool
    text: str
    """Figures as JSON, or the error of a failed case."""


def work(connection: Connection, log: str) -> None:
    """Run cases until the driver closes its end of the connection.

    Args:
        connection: Receives pickled functions, and sends an `Answer` to each.
        log: File for all output, including that of subprocesses.
    """
    os.setsid()
    threading.Thread(target=_end_with_driver, name="end with driver", daemon=True).start()
    _print_to(log)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the driver requests a stack before it ends a case
    state: dict[str, Any] = {}
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send(_answer(message, state))


def _answer(message: bytes, state: dict[str, Any]) -> Answer:
    try:
        figures = pickle.loads(message)(state)
        if not isinstance(figures, dict):
            raise TypeError(f"a case returns a dict of figures; this one returned {type(figures).__name__}")
        return Answer(True, json.dumps(figures, allow_nan=False, default=_plain))
    except BaseException as error:  # sys.exit() in a case is a failure of that case
        traceback.print_exc()
        message_lines = str(error).strip().splitlines() or [""]
        return Answer(False, f"{type(error).__name__}: {message_lines[0]}"[:LONGEST_ERROR])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _plain(value: Any) -> object:
    """Convert a number or array of NumPy or JAX for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"figures are JSON; {type(value).__name__} is not")


def _print_to(path: str) -> None:
    """Redirect output of this process and its children to a file, with line buffering in case of a crash.

    The driver has the file open, so its name is removed. A killed driver leaves no file behind.
    """
    log = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.unlink(path)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)


def _end_with_driver() -> None:
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join()
    os.killpg(os.getpid(), signal.SIGKILL)
