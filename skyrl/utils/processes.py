"""Processes of Linux: unique identities, descendants, and termination together with the parent."""

import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

START_TIME = 19
"""Index of the start time among the fields of /proc/PID/stat after the name (proc(5): field 22)."""


class ProcessIdentity(NamedTuple):
    """Unique identity of a process."""

    pid: int
    start_time: int
    """Start time, in clock ticks since boot."""
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """Return the identity of a running process; None if it does not exist, or is a zombie."""
        try:
            entries = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if entries[0] in "ZX":
            return None
        return cls(pid, int(entries[START_TIME]), boot_id())

    @property
    def runs(self) -> bool:
        """True until the process has ended."""
        return ProcessIdentity.of(self.pid) == self

    def handle(self) -> int | None:
        """Return a file descriptor that becomes readable when the process ends; None if it has ended."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.runs:  # so it was also running when the handle was created
            return handle
        os.close(handle)
        return None


def boot_id() -> str:
    """Return an id of the machine's current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def end_group(leader: ProcessIdentity) -> None:
    """Kill a process group by its leader, if the leader is running."""
    if leader.runs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)


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


_SET_PARENT_DEATH_SIGNAL = 1


def die_with_parent(link: socket.socket | None = None) -> None:
    """Let the kernel kill this process when the thread that started it ends. Does nothing on other systems.

    Args:
        link: Socket whose other end only the parent has. It shows whether the parent has already ended. None: a parent
            that has already ended is not noticed.

    Raises:
        OSError: The system call fails.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if link is None:
        return
    poll = select.poll()
    poll.register(link, 0)  # POLLHUP is always reported
    if poll.poll(0):
        os._exit(1)


NEEDED = ("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Names that look like secrets and stay: a child may load a model from the hub, or join the cluster of its parent."""

SECRET = re.compile(r"(?:^|_)(?:KEY|KEY_ID|TOKEN|SECRET|CREDENTIALS)$|PASSWORD|PASSWD|DATABASE_URL$", re.IGNORECASE)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those whose names are usual for secrets, such as WANDB_API_KEY and PGPASSWORD."""
    return {name: value for name, value in environment.items() if name in NEEDED or not SECRET.search(name)}
