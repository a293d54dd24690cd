"""Process of a group: runs the cases that it is sent, one after the other, and answers with their figures.

It leads a session of its own, so that it can be killed with all that it has started, and ends with its driver, even one
that was killed. What it prints goes to a log, of which the driver shows the end where a case fails. It does not decide
anything: after an exception it would run the next case as well.
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
"""Characters of an error in one line. XLA's messages go on for pages, which the log has."""


class Answer(NamedTuple):
    """End of a case, as its process tells it."""

    ok: bool
    text: str
    """The figures as JSON; of a case that failed, the error."""


def work(connection: Connection, log: str) -> None:
    """Answer until the driver closes its end of the connection.

    Args:
        connection: Gives pickled functions, takes an `Answer` to each.
        log: File that takes all output, of subprocesses too.
    """
    os.setsid()
    threading.Thread(target=_end_with_driver, name="end with driver", daemon=True).start()
    _print_to(log)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # a driver that ends a case asks for its stack before
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
    """JSON of a number or array of NumPy or JAX."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"figures are JSON; {type(value).__name__} is not")


def _print_to(path: str) -> None:
    """Send what this process and its children print to a file, line by line: each may be the last one.

    The driver has the file open, so its name is removed: a driver that is killed leaves nothing behind.
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
