"""Identity of a process beyond its number, which another may have after it (Linux only)."""

import contextlib
import os
import signal
from pathlib import Path
from typing import NamedTuple

START_TIME = 19
"""Index of the start time among the entries of /proc/PID/stat that follow the name (proc(5): 22nd of all)."""


class ProcessIdentity(NamedTuple):
    """One process, and no other that ever was or will be."""

    pid: int
    start_time: int
    """Clock ticks from boot."""
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """Identity of a process that runs; None if there is none, or it has ended and nobody has heard of it."""
        try:
            entries = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if entries[0] in "ZX":
            return None
        return cls(pid, int(entries[START_TIME]), boot_id())

    @property
    def runs(self) -> bool:
        """True as long as it has not ended."""
        return ProcessIdentity.of(self.pid) == self

    def handle(self) -> int | None:
        """File descriptor that is readable once it has ended; None if it has."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.runs:  # and so it was when the handle was made
            return handle
        os.close(handle)
        return None


def boot_id() -> str:
    """Identity of the machine since it was started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def end_group(leader: ProcessIdentity) -> None:
    """Kill a process that leads a group, with all in the group."""
    if leader.runs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
