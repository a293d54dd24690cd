"""Termination of a process together with its parent, even if the process is suspended or hangs (Linux only)."""

import ctypes
import os
import select
import signal
import socket
import sys

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
