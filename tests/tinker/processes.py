"""Servers as their users start them, with the fake backend: real processes, which tests signal and kill."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from skyrl.tinker.local_server import Pids, pids_of
from tests.tinker.harness import BASE_MODEL, LiveServer
from tests.waiting import BOUND_S, TooLate

ROOT = Path(__file__).parents[2]


def command(folder: Path, *program: str, **options: object) -> list[str]:
    """The command line of a server with its state in `folder`."""
    given = {
        "backend": "tests.fakes:FakeBackend",
        "base-model": BASE_MODEL,
        "port": 0,
        "checkpoints-base": folder / "checkpoints",
        "database-url": f"sqlite:///{folder / 'server.db'}",
        **{name.replace("_", "-"): value for name, value in options.items()},
    }
    module = program or ("skyrl.tinker.api",)
    return [sys.executable, "-m", *module, *(f"--{name}={value}" for name, value in given.items())]


class ServerProcess(LiveServer):
    """A server; `output` is what it has printed so far, `process` its launcher."""

    url = ""

    def __init__(self, process: subprocess.Popen[str]):
        self.process, self.output = process, ""
        self._news = threading.Condition()
        self._closed = False
        threading.Thread(target=self._read).start()

    def connect(self) -> None:
        """Wait until it is ready and can be asked."""
        self.wait_for("TINKER_BASE_URL=")
        self.url = self.output.rpartition("TINKER_BASE_URL=")[2].split()[0]
        self.http = httpx.Client(base_url=f"{self.url}/api/v1", timeout=BOUND_S)

    def wait_for(self, text: str, count: int = 1) -> None:
        """Return once it has printed `text` `count` times."""
        self.wait_until(lambda: self.output.count(text) >= count or self._closed)
        assert self.output.count(text) >= count, f"the server has ended: {self.output}"

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once what it has printed makes `condition` true."""
        with self._news:
            if not self._news.wait_for(condition, BOUND_S):
                raise TooLate(f"not within {BOUND_S:g} s; the server has said:\n{self.output}")

    def pids(self) -> Pids:
        return pids_of(self.process.pid)

    def kill(self, name: str) -> int:
        """Kill one of its processes with SIGKILL. Returns its process id."""
        pid = getattr(self.pids(), name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def end(self, number: int) -> tuple[int, str]:
        """(exit code, all that was printed) after a signal to the launcher."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> tuple[int, str]:
        """(exit code, all that was printed) once all of its processes are gone."""
        self.wait_until(lambda: self._closed)
        return self.process.wait(BOUND_S), self.output

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.output += line
                self._news.notify_all()
        with self._news:
            self._closed = True
            self._news.notify_all()


@contextmanager
def started(
    folder: Path, *program: str, env: dict[str, str] | None = None, **options: object
) -> Iterator[ServerProcess]:
    """A server that may not be ready yet, and is gone at the end of the block."""
    process = subprocess.Popen(
        command(folder, *program, **options),
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        server = ServerProcess(process)
        try:
            yield server
        finally:
            process.kill()
            server.ended()


@contextmanager
def running(
    folder: Path, *program: str, env: dict[str, str] | None = None, **options: object
) -> Iterator[ServerProcess]:
    """A server that is ready, and gone at the end of the block."""
    with started(folder, *program, env=env, **options) as server:
        server.connect()
        with server.http:
            yield server


def run_to_its_end(folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Start a server that ends by itself."""
    return subprocess.run(command(folder, **options), cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S)
