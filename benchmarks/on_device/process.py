"""The driver's control of a group's process: start it, let it run cases, and end it with all its descendants.

Servers started by a case are separate sessions. A signal to the process group does not reach them, and they would
survive a crash of the case and keep the device's memory. So the process and its descendants have a mark in their
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
"""Seconds that a process may take to end on request."""
GONE_S = 20.0
"""Seconds until killed processes must be gone. A driver that frees much device memory takes a few."""
STACK_S = 1.0
"""Maximum wait for the stack of a case that has timed out."""
OUTPUT_LINES, STACK_LINES = 20, 12
"""Numbers of last lines of output, and of innermost lines of a stack, in the result of a failed case."""
OUTPUT_BYTES = 2**16


class Outcome(NamedTuple):
    """End of a case."""

    status: str
    seconds: float
    result: dict[str, object] | None = None
    error: str | None = None
    output: str | None = None


class GroupProcess:
    """A new process, started at once. It must be closed."""

    def __init__(self):
        self._log, self._log_name = tempfile.mkstemp(prefix="skyrl-on-device-")
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # it outlives this process, so it must not inherit the mark
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
        """True while it can run further cases."""

    def run(self, case: Case, limit_s: float) -> Outcome:
        """Run a case, for at most `limit_s` seconds. The process survives only if the case has returned figures."""
        begun, start = time.monotonic(), self._log_size()
        try:
            status, result, error = self._answer_to(case, begun + limit_s)
            seconds, end = time.monotonic() - begun, self._log_size()
            stack = self._stack() if status == TIMED_OUT else []
            if result is None:
                self._kill()
        except BaseException:  # an interrupt: the case is not waited for any more
            self._kill()
            raise
        output = None if status == OK else "\n".join(self._output(start, end)[-OUTPUT_LINES:] + stack)
        return Outcome(status, seconds, result, error, output)

    def close(self) -> None:
        """Ask the process to end, kill it if it does not, and kill its descendants."""
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
            # Processes that it has forked keep its ends of both open, so the process is checked every second.
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
        """Kill the process and its descendants, and wait until they are gone, because they hold device memory."""
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
            # A dying process loses its environment, including the mark, before its files and device memory.
            dying = _living(dying + marked)
            self._process.join(0.05)
            if not dying and not self._process.is_alive():
                break
        for process in dying:
            os.close(process)
        self._connection.close()

    def _stack(self) -> list[str]:
        """Stack of the process as lines, innermost call first."""
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
        """Lines of the log between two offsets; only the last ones if there are many."""
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
    """Running processes with this mark in their environment, as pidfds to be closed by the caller."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or belongs to another user
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(os.pidfd_open(int(folder.name)))
    return found


def _living(processes: list[int]) -> list[int]:
    """Processes (pidfds) that have not ended. The others are closed."""
    ended = wait(processes, 0)
    for process in (gone := [process for process in processes if process in ended]):
        os.close(process)
    return [process for process in processes if process not in gone]
