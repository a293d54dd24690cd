"""The API process's end of its connection to the launcher."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from skyrl.tinker.processes.launcher import ENDS, HELLO, NOW, READY

BACKLOG = 4096
"""Connections that may wait to be accepted: a client opens hundreds at once."""


class LauncherLink:
    """The API process's end of the connection to its launcher. A launcher that has gone is no error; it is told as NOW.

    Args:
        handle: The inherited socket.
        listener: The listening socket, if the launcher has one.
        again: Whether an earlier API process of this launcher was ready, so that its user knows where the server is.
    """

    def __init__(self, handle: int, listener: int | None, again: bool):
        os.set_inheritable(handle, False)
        self._socket = socket.socket(fileno=handle)
        self._socket.setblocking(False)
        self.listener = None if listener is None else socket.socket(fileno=listener)
        if self.listener is not None:
            self.listener.set_inheritable(False)
        self.again = again

    def greet(self, made: socket.socket | None) -> None:
        """Orders are taken from now on. `made` is a new listening socket for the launcher to keep."""
        with suppress(OSError):
            socket.send_fds(self._socket, [HELLO], [] if made is None else [made.fileno()])

    def say_ready(self) -> None:
        """The engine is ready."""
        self._say(READY)

    def say_ends(self) -> None:
        """This process exits next, as it should."""
        self._say(ENDS)

    def watch(self, on_order: Callable[[bool], None]) -> None:
        """Call `on_order` on the running loop when this process is to stop; with True: at once."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                orders = self._socket.recv(64)
            except OSError:
                orders = b""
            if not orders:
                loop.remove_reader(self._socket)
            # Whoever starts the server again need not wait: what is not stored is in the log.
            on_order(NOW in orders or not orders)

        loop.add_reader(self._socket, read)

    def _say(self, message: bytes) -> None:
        with suppress(OSError):
            self._socket.send(message)


def fail(message: str, link: LauncherLink, for_good: bool = False) -> int:
    """Say what the person who started the server has to know. Returns the exit status of that.

    A server that has been ready before ends only `for_good`: what else is wrong now may be mended.

    Raises:
        SystemExit: The launcher, which has heard nothing of an end, is to try again.
    """
    if link.again and not for_good:
        raise SystemExit(f"skyrl: {message}")
    print(f"skyrl: error: {message}", file=sys.stderr, flush=True)
    return 1
