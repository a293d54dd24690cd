"""Stalls of a server's event loop, and of another key's heartbeats with it, while a request is worked on.

The work is real: nothing is held up, because what waits lets go of the interpreter and what works may not. Stalls are
counted in seconds of this process's processor time, which other processes have no part in, and compared with those of
the whole work, so that it does not matter how fast the machine is.
"""

import asyncio
import gc
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.tinker.in_process import InProcessServer

TICK_S = 0.002
SHARE = 1 / 8
"""Part of the work that the longest stall may be. Where all of it is done in one piece, this is a quarter or more."""
SHORT_S = 0.05
"""Seconds that a stall may always last."""
OTHER = "tml-other"
"""The key of those who are not to notice."""


@dataclass
class Meanwhile:
    """Events beside a request."""

    responses: list[httpx.Response]
    work_s: float = 0.0
    longest_stall_s: float = 0.0
    heartbeats_s: list[float] = field(default_factory=list)

    @property
    def allowed_s(self) -> float:
        """Longest allowed stall."""
        return max(SHORT_S, SHARE * self.work_s)


class Stalls(InProcessServer):
    """A server that says how it goes on while requests are worked on."""

    def __init__(self, folder: Path, **options: Any):
        super().__init__(folder, **{"api_keys": ["tml-test", OTHER], **options})

    def answer(self, request_id: str, outcome: Any) -> None:
        """There is a result of the caller's."""
        server = self.app.state.server
        server.queue.futures.add(request_id, server.service.keys.caller("tml-test").tenant)
        server.queue.futures.set(request_id, outcome)

    def sent(self, path: str, body: bytes | None = None, key: str = "tml-test", **options: Any) -> Coroutine:
        """A request, to be made while others are."""
        headers = {"X-API-Key": key, **options.pop("headers", {})}
        return self._http.request("POST", path, content=body, headers=headers, **options)

    def asked(self, url: str) -> Coroutine:
        """A page that any key may read."""
        return self._http.get(f"http://server{url}", headers={"X-API-Key": "tml-test"})

    def meanwhile(self, *requests: Coroutine) -> Meanwhile:
        """Make requests, and see what goes on beside them.

        Nothing is collected meanwhile: earlier tests of this process have left more to look through than a server has.
        """
        session = self.post("/create_session", {}, OTHER).json()["session_id"]
        gc.disable()
        try:
            return self._runner.run(self._meanwhile(session, requests))
        finally:
            gc.enable()

    async def _meanwhile(self, session: str, requests: tuple[Coroutine, ...]) -> Meanwhile:
        seen, begun = Meanwhile([]), time.process_time()
        beside = [asyncio.create_task(self._tick(seen)), asyncio.create_task(self._beat(seen, session))]
        try:
            seen.responses = await asyncio.gather(*requests)
        finally:
            seen.work_s = time.process_time() - begun
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        return seen

    async def _tick(self, seen: Meanwhile) -> None:
        last = time.process_time()
        while True:
            try:
                await asyncio.sleep(TICK_S)
            finally:
                now = time.process_time()
                seen.longest_stall_s, last = max(seen.longest_stall_s, now - last), now

    async def _beat(self, seen: Meanwhile, session: str) -> None:
        while True:
            begun = time.process_time()
            response = await self.sent("/session_heartbeat", key=OTHER, json={"session_id": session})
            assert response.status_code == 200, response.text
            seen.heartbeats_s.append(time.process_time() - begun)
            await asyncio.sleep(0.01)


def length_delimited(number: int, content: bytes) -> bytes:
    """A field of a protobuf message."""
    size, length = len(content), b""
    while size > 127:
        size, length = size >> 7, length + bytes([size & 127 | 128])
    return bytes([number << 3 | 2]) + length + bytes([size]) + content
