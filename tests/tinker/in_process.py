"""A server without sockets, whose event loop runs only while the test waits for it.

Requests go straight into the ASGI application, so a test that makes thousands of them takes seconds. The engine loop
works in its thread all the time; what it reports is read when the loop runs next, as on a busy machine.
"""

import asyncio
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from skyrl.tinker.http.app import create_app
from tests.tinker.harness import PROTOBUF, LiveServer, ThreadEngine


class InProcessServer(LiveServer):
    """A server whose state is in `folder`; a second one continues where the first stopped."""

    def __init__(self, folder: Path, **options: Any):
        super().__init__(folder, **{"long_poll_s": 0.05, **options})

    def __enter__(self) -> "InProcessServer":
        self._runner = asyncio.Runner()
        self.app = create_app(self.config, ThreadEngine)
        self._lifespan = self.app.router.lifespan_context(self.app)
        self._runner.run(self._lifespan.__aenter__())
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://127.0.0.1/api/v1")
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._http.aclose())
        self._runner.run(self._lifespan.__aexit__(None, None, None))
        self._runner.close()

    def crash(self) -> None:
        """The engine ends by itself, as soon as it has been there."""
        while self.engine.state != "ready":
            self.let_it_work(0.001)
        self._runner.run(self.engine.crash())

    def recover(self) -> None:
        """A new engine takes over."""
        self._runner.run(self.engine.recover())

    def restart(self) -> None:
        """Stop in order, and start again."""
        self.__exit__()
        self.__enter__()

    def kill(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Start again from what was on disk at this moment, as after a SIGKILL.

        The event loop stands still meanwhile, so no file goes that the database, which is copied first, still names.

        Args:
            meanwhile: Called before the start.
        """
        at_its_end = self.folder.with_name(f"{self.folder.name}-at-its-end")
        at_its_end.mkdir()
        with (
            closing(sqlite3.connect(self.folder / "server.db")) as now,
            closing(sqlite3.connect(at_its_end / "server.db")) as copy,
        ):
            now.backup(copy)
        while not _copied(self.folder / "checkpoints", at_its_end / "checkpoints"):
            pass
        self.__exit__()
        shutil.rmtree(self.folder)
        at_its_end.rename(self.folder)
        meanwhile()
        self.__enter__()

    def let_it_work(self, seconds: float = 0.0) -> None:
        """Run the event loop for a moment."""
        self._runner.run(asyncio.sleep(seconds))

    def request(self, method: str, path: str, key: str = "tml-test", **options: Any) -> httpx.Response:
        headers = {"X-API-Key": key, **options.pop("headers", {})}
        return self._runner.run(self._http.request(method, path, headers=headers, **options))

    def post(self, path: str, body: Any = None, key: str = "tml-test", **options: Any) -> httpx.Response:
        return self.request("POST", path, key, json=body, **options)

    def poll(self, request_id: str, key: str = "tml-test") -> httpx.Response:
        body = {"request_id": request_id}
        return self.request("POST", "/retrieve_future", key, json=body, headers={"Accept": PROTOBUF})

    def outcome(self, request_id: str, key: str = "tml-test") -> httpx.Response:
        """The final answer to `retrieve_future`."""
        for _ in range(400):
            if (response := self.poll(request_id, key)).status_code != 408:
                return response
        raise AssertionError(f"{request_id} does not finish: {response.text}")


def _copied(source: Path, target: Path) -> bool:
    """Copy a folder. Return True if nothing in it was renamed meanwhile."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target)
    except (shutil.Error, OSError):
        return False
    return True
