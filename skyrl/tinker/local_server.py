"""A local Tinker server on a free port. It is a child process that stops with its parent, even if the parent is killed.

The demos, tests and benchmarks use it to talk to a real server as any client does. All state is in one folder, so that
a second server on the same folder continues where the first one stopped.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tinker import ServiceClient

CLOSE_S = 120.0
"""Maximum seconds for closing an SDK client."""
CANCEL_S = 10.0
"""Seconds after its cancellation until a task of a client counts as hanging."""


class Pids(NamedTuple):
    """Process ids of a server. None: the process does not exist now."""

    launcher: int | None
    api: int | None
    engine: int | None


class LocalServer:
    """`with LocalServer(folder) as server:` serves at `server.url` until the block ends.

    Args:
        folder: Folder for the database, the checkpoints and the log (`server.log`). Created if missing.
        base_model: Folder or hub id of the base model; None: the built-in model.
        options: More command-line options of the server, by name without leading dashes. The default `backend` is jax.
        environment: Environment variables of the server, in addition to those of this process.
    """

    def __init__(
        self,
        folder: Path,
        base_model: str | None = None,
        options: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
    ):
        self.folder = folder
        self.base_model = base_model
        self.options = options or {}
        self.environment = environment or {}
        reserved = reserve_port()
        weakref.finalize(self, reserved.close)
        self.port: int = reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        """The launcher process."""
        self._alive: int | None = None

    @property
    def log_path(self) -> Path:
        return self.folder / "server.log"

    def arguments(self) -> list[str]:
        """Return the command-line options of the server."""
        options = {
            "host": "127.0.0.1",
            "port": str(self.port),
            "checkpoints-base": str(self.folder / "checkpoints"),
            "database-url": f"sqlite:///{self.folder / 'server.db'}",
            **self.options,
        }
        if self.base_model is not None:
            options["base-model"] = self.base_model
        if "backend" not in options:  # warm-up does not pay off for a short-lived server
            config = {"warm_up": False, **json.loads(options.get("backend-config", "{}"))}
            options |= {"backend": "jax", "backend-config": json.dumps(config)}
        return [f"--{name}={value}" for name, value in options.items()]

    def start(self, timeout_s: float = 180) -> None:
        """Start the server and wait until it is ready. Raises RuntimeError with the end of the log if it fails."""
        assert self.process is None, "already started"
        self.folder.mkdir(parents=True, exist_ok=True)
        its, self._alive = os.pipe()
        command = [sys.executable, "-m", "skyrl.tinker.processes.launcher", str(its), *self.arguments()]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                pass_fds=[its],
                env={**os.environ, **self.environment},
            )
        os.close(its)
        try:
            self.wait_until_ready(timeout_s)
        except BaseException:
            self.stop()
            raise

    def wait_until_ready(self, timeout_s: float = 180) -> None:
        """Wait until `healthz` returns ok. Raises RuntimeError if the server exits or the timeout passes."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while not self.healthy():
            if self.process.poll() is not None:
                raise RuntimeError(f"the server exited with code {self.process.returncode}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the server was not ready after {timeout_s:.0f} s:\n{self.log_tail()}\n{self.stacks()}"
                )
            time.sleep(0.1)

    def healthy(self) -> bool:
        """Return True if the server answers and its engine is ready."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5) as response:
                return json.load(response).get("status") == "ok"
        except (OSError, http.client.HTTPException, ValueError):  # not listening, or exited while answering
            return False

    def log_tail(self, lines: int = 30) -> str:
        """Return the last lines of the server's log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def stacks(self) -> str:
        """Make the server's processes write the stacks of their threads to the log, and return them."""
        start = self.log_path.stat().st_size
        for pid in self.pids()[1:]:
            with suppress(ProcessLookupError):  # the process may exit at any time
                if pid is not None:
                    os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)
        return self.log_path.read_bytes()[start:].decode(errors="replace")

    def pids(self) -> Pids:
        """Return the current processes of the server (Linux only)."""
        return pids_of(None if self.process is None or self.process.poll() is not None else self.process.pid)

    def kill_api(self) -> int:
        """Kill the API process. Returns its process id."""
        return _kill(self.pids().api)

    def kill_engine(self) -> int:
        """Kill the engine process. Returns its process id."""
        return _kill(self.pids().engine)

    def stop(self) -> None:
        """Stop the server as with Ctrl-C. Sends a second SIGTERM after 30 seconds, and SIGKILL after 10 more."""
        if self.process is None:
            return
        process, self.process = self.process, None
        if process.poll() is None:
            process.terminate()  # not SIGINT, which the server ignores if this process does
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.terminate()  # the second one does not wait for open requests
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None

    def restart(self) -> None:
        """Stop the server and start it again with the same state and address."""
        self.stop()
        self.start()

    def __enter__(self) -> "LocalServer":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        self.stop()


def close_client(client: "ServiceClient") -> None:
    """Finish the session of an SDK client and release its resources.

    The SDK's own `close` may hang: it waits for the task that polls for samples, and anyio can lose the cancellation of
    a task that is opening a connection (https://github.com/agronholm/anyio/issues/1214). The server has finished the
    session by then; connections of the client stay open.

    Raises:
        TimeoutError: `close` hangs for another reason.
    """
    closing, holder = client.close("success"), client._session_holder
    deadline = time.monotonic() + CLOSE_S
    while True:
        try:
            return closing.result(timeout=CANCEL_S)
        except TimeoutError:
            tasks = list(holder._futures_poller_tasks) if holder is not None else []
            if any(task.cancelling() for task in tasks):
                return
            if time.monotonic() > deadline:
                raise


def reserve_port() -> socket.socket:
    """Reserve a port of 127.0.0.1 for a server that is started later or restarted. Returns a socket bound to the port.

    Until the socket is closed, the system does not assign the port to other sockets. A server that sets SO_REUSEADDR,
    as `socket.create_server` and PostgreSQL do, can still listen on it. Until a server listens, connections are
    refused.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def pids_of(launcher: int | None) -> Pids:
    """Return the process ids of a server. `launcher` is the process id of its launcher, if one is running."""
    api = _child(launcher, "skyrl.tinker.api_process")
    return Pids(launcher, api, _child(api, "skyrl.tinker.engine"))


def _child(parent: int | None, module: str) -> int | None:
    """Return the child process that runs `module`, or None."""
    if parent is None:
        return None
    with suppress(FileNotFoundError, ProcessLookupError):  # the parent may exit at any time
        for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(FileNotFoundError, ProcessLookupError):
                for child in tasks.read_text().split():
                    if module in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
                        return int(child)
    return None


def _kill(pid: int | None) -> int:
    assert pid is not None, "there is no such process now"
    os.kill(pid, signal.SIGKILL)
    return pid
