"""Start, signals and exit of the engine process, for its parent.

This module needs only the configuration, so the API process starts the engine before it imports its own dependencies,
and both processes load in parallel.
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
from skyrl.utils.processes import kill_tree

MALLOC = "glibc.malloc.hugetlb=1"
"""Setting of glibc that allocates large arrays on huge pages, if the system has them. In a training step, this reduces
page faults by a factor of 30."""


def _environment_without_secrets() -> dict[str, str]:
    hidden = {prefix + name.upper() for prefix in ENVIRONMENT_PREFIXES for name in SECRET}
    return {name: value for name, value in os.environ.items() if name not in hidden}


class EngineProcess:
    """A child process that inherits one end of a socketpair and nothing else, and exits when its parent does.

    Linux also kills the child when the thread that created it ends, so create it in a long-lived thread.

    Args:
        config: Configuration, which the engine receives in its first frame.

    Raises:
        OSError: The system cannot create another process.
    """

    def __init__(self, config: EngineConfig):
        self.socket, its = socket.socketpair()
        tunables = ":".join(filter(None, [MALLOC, os.environ.get("GLIBC_TUNABLES")]))
        try:
            with its:
                # In a separate session, so that a Ctrl-C at the terminal reaches the API process only.
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
        with suppress(OSError):  # the process may have exited; its end of the socket will tell
            for piece in encode(Start(config.without_secrets())):
                self.socket.sendall(piece)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="engine process")
        """Two threads, for two concurrent callers of `wait`."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has exited."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and all its children, such as sampling engines, which would outlive it."""
        if self._process.poll() is None:
            kill_tree(self._process.pid)

    async def wait(self, patience_s: float | None = None) -> int:
        """Wait for the exit and return the status (-N: killed by signal N). Raises TimeoutError after `patience_s`
        seconds."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._process.wait, patience_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def close(self) -> None:
        """Kill the process and its children if it is running, and release its resources."""
        self.kill()
        self._process.wait()
        self._threads.shutdown(wait=False)
        self.socket.close()
