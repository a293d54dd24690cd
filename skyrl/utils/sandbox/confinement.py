"""Confinement of a process before it runs code of a model: bounded memory, no rights, no root user.

Standard library only; the process starts from nothing.
"""

import ctypes
import os
import resource
import struct
from collections.abc import Sequence

from skyrl.utils.sandbox.linux import call, libc

NOBODY = 65534
"""User and group who own nothing: what root becomes."""
MAX_THREADS = 64
MAX_OPEN_FILES = 64
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 4, 8
_READ_ALL = 1 << 2
"""The capability CAP_DAC_READ_SEARCH."""


def die_with_parent() -> None:
    """This process is killed when the one that started it ends. To be said again after a change of user."""
    call(libc.prctl, _PR_SET_PDEATHSIG, 9, 0, 0, 0)


def hide_memory() -> None:
    """Other processes of the same user cannot look into this one, nor into those it starts."""
    call(libc.prctl, _PR_SET_DUMPABLE, 0, 0, 0, 0)


def limit_resources(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Limits of this process: seconds of CPU time, address space, size of a file, open files; no core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))


def limit_threads() -> None:
    """At most `MAX_THREADS`, where this process is in a user namespace: the kernel counts those of its user there.

    Elsewhere it counts all that the user runs on the machine, and for root nothing.
    """
    most = MAX_THREADS + 2  # the two processes that watch over this one
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def give_up_rights(readable: Sequence[str], *, may_read_all: bool) -> bool:
    """Become `NOBODY` if this process is root, and give up all that root, or the owner of a namespace, may do.

    Args:
        readable: What must be readable afterwards. Python may be installed where only root can read.
        may_read_all: Whether the right to read all files may be kept if that is so, because another wall says which.

    Returns True if the process is another user than root now.
    """
    kept = 0
    if os.getuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            call(libc.prctl, _PR_SET_KEEPCAPS, 1, 0, 0, 0)
            os.setresuid(NOBODY, NOBODY, 0)  # there is a way back yet
            if not all(map(_can_read, readable)):
                kept = _READ_ALL
            if not kept or (may_read_all and _has(kept)):
                os.setresuid(NOBODY, NOBODY, NOBODY)
            else:
                os.setresuid(0, 0, 0)
                kept = 0
        except OSError:  # root of a container that may not name other users
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
