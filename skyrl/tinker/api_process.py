"""The API process, as its keeper starts it: reads the options, then serves.

Nothing that takes time is imported before the options are known to be good.
"""

import argparse
import asyncio
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from skyrl.tinker.config import EngineConfig, parse_config
from skyrl.tinker.engine_process import EngineProcess
from skyrl.tinker.keeper import ENDS, HELLO, NOW, READY
from skyrl.tinker.lease import LOOK_S, NOTICE_S

BACKLOG = 4096
"""Connections that may wait to be accepted: a client opens hundreds at once."""


class KeeperLink:
    """The API process's end of the connection to its keeper. A keeper that has gone is no error; it is told as NOW.

    Args:
        handle: The inherited socket.
        listener: The listening socket, if the keeper has one.
        again: Whether an earlier API process of this keeper was ready, so that its user knows where the server is.
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
        """Orders are taken from now on. `made` is a new listening socket for the keeper to keep."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: `--link N [--listener N] [--again] --prog P -- OPTIONS`. Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--")
    parser = argparse.ArgumentParser(description="The API process. Started by its keeper (skyrl serve).")
    parser.add_argument("--link", type=int, required=True)
    parser.add_argument("--listener", type=int)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--prog", required=True)
    own = parser.parse_args(arguments[:end])
    link = KeeperLink(own.link, own.listener, own.again)
    try:
        config = parse_config(arguments[end + 1 :], prog=own.prog)
    except SystemExit as end:  # help, or a bad option
        if not (link.again and end.code):  # of a file, as the options were good before: it may be mended
            link.say_ends()
        raise
    status = _run(config, link)
    link.say_ends()
    return status


def fail(message: str, link: KeeperLink, for_good: bool = False) -> int:
    """Say what the person who started the server has to know. Returns the exit status of that.

    A server that has been ready before ends only `for_good`: what else is wrong now may be mended.

    Raises:
        SystemExit: The keeper, which has heard nothing of an end, is to try again.
    """
    if link.again and not for_good:
        raise SystemExit(f"skyrl: {message}")
    print(f"skyrl: error: {message}", file=sys.stderr, flush=True)
    return 1


def _run(config: EngineConfig, link: KeeperLink) -> int:
    try:
        listener = link.listener or _listen(config.host, config.port)
    except OSError as error:
        return fail(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; choose another --host or --port", link
        )
    try:
        engine = EngineProcess(config)
    except OSError:  # the supervisor tries again
        engine = None
    try:
        from skyrl.tinker import serving  # takes a second, in which the engine loads too

        return serving.run(config, link, listener, engine)
    finally:
        if engine is not None:
            engine.close()


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        host.removeprefix("[").removesuffix("]"), port, type=socket.SOCK_STREAM
    )[0]
    deadline = time.monotonic() + NOTICE_S
    while True:
        try:
            listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
            break
        except OSError as error:  # of the server before this one, whose keeper was killed a moment ago?
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(LOOK_S)
    # asyncio sets this only on sockets made for TCP by name; without it every answer waits 40 ms for an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


if __name__ == "__main__":
    sys.exit(main())
