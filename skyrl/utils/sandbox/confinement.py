"""Confinement of a process before it runs model-written code: resource limits, no privileges, no root user.

Standard library only, for a fast start.
"""

import ctypes
import os
import resource
import struct
from collections.abc import Sequence

from skyrl.utils.sandbox.linux import call, libc

NOBODY = 65534
"""User and group that own no files. A root process becomes this user."""
MAX_THREADS = 64
MAX_OPEN_FILES = 64
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 4, 8
_READ_ALL = 1 << 2
"""The capability CAP_DAC_READ_SEARCH."""


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Must be repeated after a change of user."""
    call(libc.prctl, _PR_SET_PDEATHSIG, 9, 0, 0, 0)


def hide_memory() -> None:
    """Prevent other processes of the same user from inspecting this process and its children."""
    call(libc.prctl, _PR_SET_DUMPABLE, 0, 0, 0, 0)


def limit_resources(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Set limits of this process: CPU seconds, address space, file size, open files; no core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))


def limit_threads() -> None:
    """Limit threads to `MAX_THREADS`. Call it in a user namespace, where the kernel counts per namespace.

    Elsewhere, the kernel counts all threads of the user on the machine, and does not limit root.
    """
    most = MAX_THREADS + 2  # plus the two supervisor processes
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def give_up_rights(readable: Sequence[str], *, may_read_all: bool) -> bool:
    """Become `NOBODY` if this process is root, and drop all capabilities.

    Args:
        readable: Paths that must stay readable. Python may be installed where only root can read.
        may_read_all: True: another mechanism restricts reading, so keep the capability to read all files if `readable`
            requires it.

    Returns True if the process is not root afterwards.
    """
    kept = 0
    if os.getuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            call(libc.prctl, _PR_SET_KEEPCAPS, 1, 0, 0, 0)
            os.setresuid(NOBODY, NOBODY, 0)  # the saved user id still allows a return
            if not all(map(_can_read, readable)):
                kept = _READ_ALL
            if not kept or (may_read_all and _has(kept)):
                os.setresuid(NOBODY, NOBODY, NOBODY)
            else:
                os.setresuid(0, 0, 0)
                kept = 0
        except OSError:  # root in a container that may not use other users
            pass
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    call(libc.capset, header, ctypes.create_string_buffer(struct.pack("6I", kept, kept, 0, 0, 0, 0)))
    return os.getuid() != 0


def _can_read(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError:
        return False
    return True


def _has(capability: int) -> bool:
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    data = ctypes.create_string_buffer(24)
    call(libc.capget, header, data)
    return bool(struct.unpack("6I", data.raw)[1] & capability)
