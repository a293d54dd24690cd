"""Identity of a process beyond its pid, which may be reused (Linux only)."""

import contextlib
import os
import signal
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
