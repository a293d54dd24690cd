"""The process that an engine runs in, as its parent sees it.

It needs nothing but the configuration, so that the first one is started before the API process has loaded what it needs
itself: both then load side by side.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from skyrl.tinker.config import ENVIRONMENT_PREFIXES, SECRET, EngineConfig
from skyrl.tinker.processes.channel import encode
from skyrl.tinker.processes.messages import Start

MALLOC = "glibc.malloc.hugetlb=1"
"""Large arrays on huge pages, where the system has them: a training step then has 30 times fewer page faults."""


def _environment_without_secrets() -> dict[str, str]:
    hidden = {prefix + name.upper() for prefix in ENVIRONMENT_PREFIXES for name in SECRET}
    return {name: value for name, value in os.environ.items() if name not in hidden}


class EngineProcess:
    """A child that inherits one end of a socketpair and nothing else, and leaves when this process does.

    Where it cannot leave, Linux kills it at the end of the thread that makes this, which has to be one that stays.

    Args:
        config: What it is told to start with.

    Raises:
        OSError: The system gives no further process.
    """

    def __init__(self, config: EngineConfig):
        self.socket, its = socket.socketpair()
        tunables = ":".join(filter(None, [MALLOC, os.environ.get("GLIBC_TUNABLES")]))
        try:
            with its:
                # In a session of its own, so that a Ctrl-C at the terminal reaches the API process only.
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "skyrl.tinker.engine", "--fd", str(its.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[its.fileno()],
                    start_new_session=True,
                    env={**_environment_without_secrets(), "GLIBC_TUNABLES": tunables},
                )
        except BaseException:
            self.socket.close()
            raise
        with suppress(OSError):  # it may have ended already, which its end of the socket will tell
            for piece in encode(Start(config.without_secrets())):
                self.socket.sendall(piece)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="engine process")
        """One for each of those who may wait for its end at the same time."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        self._process.send_signal(number)

    async def wait(self, patience_s: float | None = None) -> int:
        """The exit status (-N: killed by signal N), once it has ended. Raises TimeoutError if that takes longer."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._process.wait, patience_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def close(self) -> None:
        """End it at once, if it has not ended, and forget it."""
        self._process.kill()
        self._process.wait()
        self._threads.shutdown(wait=False)
        self.socket.close()
