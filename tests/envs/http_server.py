"""An app on a port of its own, reached over HTTP."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from skyrl.tinker.local_server import reserve_port

_RESERVED: list[socket.socket] = []


@contextlib.contextmanager
def serving(app: FastAPI, port: int = 0) -> Iterator[str]:
    """The address of `app` while the block runs, on a port that is given or a free one."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def closed_port() -> int:
    """A port that nobody listens on. It stays reserved: a server may be started there later."""
    _RESERVED.append(reserve_port())
    return _RESERVED[-1].getsockname()[1]
