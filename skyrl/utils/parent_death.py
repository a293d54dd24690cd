"""A process that does not outlive the one that started it, not even where it is stopped or hangs (Linux only)."""

import ctypes
import os
import select
import signal
import socket
import sys

_SET_PARENT_DEATH_SIGNAL = 1


def die_with_parent(link: socket.socket) -> None:
    """Let the system kill this process when the thread that started it has ended; elsewhere do nothing.

    Args:
        link: Connected to the parent, which alone has its other end; that tells whether it has gone already.

    Raises:
        OSError: The system refuses.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    poll = select.poll()
    poll.register(link, 0)  # that it is closed is told without being asked for
    if poll.poll(0):
        os._exit(1)
