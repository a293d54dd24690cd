"""Entry point of the API process: parses the options, then serves.

Slow modules are imported only after the options were validated.
"""

import argparse
import errno
import socket
import sys
import time
from collections.abc import Sequence

from skyrl.tinker.config import EngineConfig, parse_config
from skyrl.tinker.processes.engine_process import EngineProcess
from skyrl.tinker.processes.launcher_link import BACKLOG, LauncherLink, fail
from skyrl.utils.locks.file_lock import LOOK_S
from skyrl.utils.locks.lease import NOTICE_S


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: `--link N [--listener N] [--again] --prog P -- OPTIONS`. Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--")
    parser = argparse.ArgumentParser(description="The API process. Started by its launcher (skyrl serve).")
    parser.add_argument("--link", type=int, required=True)
    parser.add_argument("--listener", type=int)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--prog", required=True)
    own = parser.parse_args(arguments[:end])
    link = LauncherLink(own.link, own.listener, own.again)
    try:
        config = parse_config(arguments[end + 1 :], prog=own.prog)
    except SystemExit as end:  # help, or a bad option
        if not (link.again and end.code):  # at a restart, the file of an option became invalid and may be fixed
            link.say_ends()
        raise
    status = _run(config, link)
    link.say_ends()
    return status


def _run(config: EngineConfig, link: LauncherLink) -> int:
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
        from skyrl.tinker import serve  # takes a second, in which the engine loads too

        return serve.run(config, link, listener, engine)
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
        except OSError as error:  # the previous server may still be exiting
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(LOOK_S)
    # asyncio sets this only on sockets made for TCP by name; without it every answer waits 40 ms for an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


if __name__ == "__main__":
    sys.exit(main())
