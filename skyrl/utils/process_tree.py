"""The processes that a process has started, and those that they have started (Linux only)."""

import contextlib
import os
import signal
from pathlib import Path


def kill_descendants(pid: int) -> None:
    """Kill all descendants of a process. They are suspended first, so that none starts another one unnoticed."""
    found: list[int] = []
    while new := [one for one in _descendants(pid) if one not in found]:
        _send(new, signal.SIGSTOP)
        found += new
    _send(found, signal.SIGKILL)


def kill_tree(pid: int) -> None:
    """Kill a child of this process, which is not reaped yet, and all its descendants."""
    _send([pid], signal.SIGSTOP)
    kill_descendants(pid)
    _send([pid], signal.SIGKILL)


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found = [pid]
    for parent in found:  # grows
        found += children.get(parent, [])
    return found[1:]
