"""The process that an engine runs in, as its parent sees it.

It needs nothing but the name of a backend, so that the first one is started before the API process has loaded what it
needs itself: both then load side by side.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys

MALLOC = "glibc.malloc.hugetlb=1"
"""Large arrays on huge pages, where the system has them: a training step then has 30 times fewer page faults."""


class EngineProcess:
    """A child that inherits one end of a socketpair and nothing else, and leaves when this process does.

    Args:
        backend: What it will need; it is told everything else by a `Start` frame.
    """

    def __init__(self, backend: str):
        self.socket, its = socket.socketpair()
        with its:
            command = [sys.executable, "-m", "skyrl.tinker.engine", "--fd", str(its.fileno()), "--backend", backend]
            tunables = ":".join(filter(None, [MALLOC, os.environ.get("GLIBC_TUNABLES")]))
            # In a session of its own, so that a Ctrl-C at the terminal reaches the API process only.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                start_new_session=True,
                env={**os.environ, "GLIBC_TUNABLES": tunables},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        self._process.send_signal(number)

    async def wait(self, patience_s: float | None = None) -> int:
        """The exit status (-N: killed by signal N), once it has ended. Raises TimeoutError if that takes longer."""
        try:
            return await asyncio.to_thread(self._process.wait, patience_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def close(self) -> None:
        """End it at once, if it has not ended, and forget it."""
        self._process.kill()
        self._process.wait()
        self.socket.close()
