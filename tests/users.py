"""A second user of this machine."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

LISTENS = f"""
import os, socket, sys
os.setgid({NOBODY})
os.setuid({NOBODY})
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    connection.settimeout(60)
    print(connection.recv(65536).decode(errors="replace").replace("\\r\\n", "|"), flush=True)
"""


@contextmanager
def listener_of_another_user() -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    """Port on which a process of another user listens. The process prints what it receives on the first connection."""
    with subprocess.Popen([sys.executable, "-c", LISTENS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), process
        finally:
            process.kill()


@contextmanager
def own_listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]
