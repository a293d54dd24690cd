"""The API process's end of its connection to the launcher."""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from skyrl.tinker.processes.launcher import ENDS, HELLO, NOW, READY
from skyrl.utils.console import say_error

BACKLOG = 4096
"""Backlog of the listening socket. It is large because a client opens hundreds of connections at once."""


class LauncherLink:
    """The API process's end of the connection to its launcher. The exit of the launcher counts as the order `NOW`.

    Args:
        handle: The inherited socket.
        listener: The listening socket, if the launcher has one.
        again: True if an earlier API process of this launcher was ready, so the user knows the address of the server.
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
        """Tell the launcher that this process accepts its orders to stop.

        `made` is a new listening socket for the launcher to keep.
        """
        with suppress(OSError):
            socket.send_fds(self._socket, [HELLO], [] if made is None else [made.fileno()])

    def say_ready(self) -> None:
        """Tell the launcher that the engine is ready."""
        self._say(READY)

    def say_ends(self) -> None:
        """Tell the launcher that this process is about to exit in an orderly way."""
        self._say(ENDS)

    def watch(self, on_order: Callable[[bool], None]) -> None:
        """Call `on_order` on the running loop when this process has to stop. Its argument is True to stop at once."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                orders = self._socket.recv(64)
            except OSError:
                orders = b""
            if not orders:
                loop.remove_reader(self._socket)
            # A restart need not wait: unstored requests are in the log.
            on_order(NOW in orders or not orders)

        loop.add_reader(self._socket, read)

    def _say(self, message: bytes) -> None:
        with suppress(OSError):
            self._socket.send(message)


def fail(message: str, link: LauncherLink, for_good: bool = False) -> int:
    """Print an error for the user who started the server, and return the exit status for this process.

    If the server was ready before, the error counts as temporary unless `for_good`.

    Raises:
        SystemExit: The error is temporary. The process exits without a message, so the launcher restarts it.
    """
    if link.again and not for_good:
        raise SystemExit(f"skyrl: {message}")
    say_error(f"skyrl: error: {message}", flush=True)
    return 1
