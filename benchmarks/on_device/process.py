"""The driver's hold on the process of a group: start it, have it run cases, end it with all that it has started.

Servers that a case starts are sessions of their own, out of reach of a signal to the process group, and outlive a crash
of the case with the device's memory in their hands. So the process and its descendants carry a mark in their
environment, by which they are found and killed (Linux; elsewhere only the process group is).
"""

import json
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import uuid
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from .case import Case
from .worker import work

OK, FAILED, TIMED_OUT, CRASHED, CUT_SHORT = "ok", "failed", "timed out", "crashed", "cut short"

MARK = "SKYRL_ON_DEVICE"
PATIENCE_S = 5.0
"""Seconds that a process may take to end when it is asked to."""
GONE_S = 20.0
"""Seconds that killed processes may take to be gone. A driver that frees much device memory takes a few."""
STACK_S = 1.0
"""Longest wait for the stack of a case that has reached its limit."""
OUTPUT_LINES, STACK_LINES = 20, 12
"""Last lines of output, and innermost lines of a stack, in the result of a case that failed."""
OUTPUT_BYTES = 2**16


class Outcome(NamedTuple):
    """End of a case."""

    status: str
    seconds: float
    result: dict[str, object] | None = None
    error: str | None = None
    output: str | None = None


class GroupProcess:
    """A fresh process, started at once; `close` it in any case."""

    def __init__(self):
        self._log, self._log_name = tempfile.mkstemp(prefix="skyrl-on-device-")
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # it outlives this process, so it is not to inherit the mark
        self._connection, its = context.Pipe()
        self._mark = uuid.uuid4().hex
        self._process = context.Process(target=work, args=(its, self._log_name))
        os.environ[MARK] = self._mark
        try:
            self._process.start()
        finally:
            del os.environ[MARK]
            its.close()
        self.usable = True
        """True while it can take a further case."""

    def run(self, case: Case, limit_s: float) -> Outcome:
        """Run a case, for at most `limit_s`. The process is gone afterwards unless it has returned figures."""
        begun, start = time.monotonic(), self._log_size()
        try:
            status, result, error = self._answer_to(case, begun + limit_s)
            seconds, end = time.monotonic() - begun, self._log_size()
            stack = self._stack() if status == TIMED_OUT else []
            if result is None:
                self._kill()
        except BaseException:  # an interrupt: nobody waits for this case any more
            self._kill()
            raise
        output = None if status == OK else "\n".join(self._output(start, end)[-OUTPUT_LINES:] + stack)
        return Outcome(status, seconds, result, error, output)

    def close(self) -> None:
        """Ask it to end, kill it if it does not, and kill what it has left behind."""
        if self.usable:
            self._connection.close()
            self._process.join(PATIENCE_S)
            self._kill()
        os.close(self._log)
        Path(self._log_name).unlink(missing_ok=True)

    def _answer_to(self, case: Case, deadline: float) -> tuple[str, dict[str, object] | None, str | None]:
        """(status, figures, error) of a case."""
        with suppress(BrokenPipeError):
            self._connection.send_bytes(pickle.dumps(case.run))
        while True:
            # Processes that it has forked keep its end of both open, hence the look at the process each second.
            left = deadline - time.monotonic()
            wait([self._connection, self._process.sentinel], min(max(left, 0.0), 1.0))
            alive = self._process.is_alive()
            if self._connection.poll():
                with suppress(EOFError, OSError):
                    ok, text = self._connection.recv()
                    if not ok:
                        return FAILED, None, text
                    result = json.loads(text)
                    problems = result.get("problems")
                    return (FAILED, result, str(problems[0])) if problems else (OK, result, None)
                self._process.join(PATIENCE_S)
                alive = False
            if not alive:
                return CRASHED, None, _reason(self._process.exitcode)
            if left <= 0:
                return TIMED_OUT, None, None

    def _kill(self) -> None:
        """Kill it with all that it has started, and wait until they are gone: they hold the device's memory."""
        self.usable = False
        assert self._process.pid is not None
        deadline = time.monotonic() + GONE_S
        dying: list[int] = []
        while time.monotonic() < deadline:
            with suppress(ProcessLookupError, PermissionError):  # no such group (any more), or, on macOS, all are dead
                os.killpg(self._process.pid, signal.SIGKILL)
            if self._process.is_alive():
                self._process.kill()
            marked = _marked(self._mark)
            for process in marked:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            # A dying process loses its environment, the mark with it, before its files and the device's memory.
            dying = _living(dying + marked)
            self._process.join(0.05)
            if not dying and not self._process.is_alive():
                break
        for process in dying:
            os.close(process)
        self._connection.close()

    def _stack(self) -> list[str]:
        """Lines that say where the process is, the innermost call first."""
        start = seen = self._log_size()
        assert self._process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_S
        while time.monotonic() < deadline:
            self._process.join(0.1)
            size = self._log_size()
            if size == seen > start:
                break
            seen = size
        return self._output(start, seen)[:STACK_LINES]

    def _log_size(self) -> int:
        return os.fstat(self._log).st_size

    def _output(self, start: int, end: int) -> list[str]:
        """Lines of the log between two places; only the last of them where there are many."""
        start = max(start, end - OUTPUT_BYTES)
        return os.pread(self._log, end - start, start).decode(errors="replace").splitlines()


def _reason(status: int | None) -> str:
    """Describe the end of a process in words."""
    if status is None:
        return "its process closed the connection"
    if status >= 0:
        return f"its process ended with exit status {status}"
    name = signal.Signals(-status).name
    return f"its process was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _marked(mark: str) -> list[int]:
    """Living processes with this mark in their environment: file descriptors (pidfd), to be closed by the caller."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(os.pidfd_open(int(folder.name)))
    return found


def _living(processes: list[int]) -> list[int]:
    """Those of the processes (pidfd) that have not ended; the others are closed."""
    ended = wait(processes, 0)
    for process in (gone := [process for process in processes if process in ended]):
        os.close(process)
    return [process for process in processes if process not in gone]
