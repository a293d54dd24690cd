"""Responses during the start of the server: requests wait, and only the probes are answered.

A start may take long, for example while the database is unavailable. Requests wait until the server has started, so a
request during a restart is served normally. The liveness and readiness probes respond at once.
"""

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl.tinker.http.errors import error_response
from skyrl.tinker.http.operators.probes import LIVEZ, READYZ, unready

REASON = "the server is starting: its database and its folder are not open yet; its log says why"


class StartupGate:
    """ASGI wrapper of `app`. Before `let_in`, it passes only the liveness probe to `app`.

    Args:
        app: The application.
        patience_s: Seconds that a request waits before it is answered with 503.
    """

    def __init__(self, app: ASGIApp, patience_s: float):
        self._app = app
        self._patience_s = patience_s
        self._open = False
        self._waited = asyncio.Event()

    def let_in(self) -> None:
        """Pass all requests to the application, because the server has started."""
        self._open = True
        self._waited.set()

    def turn_away(self) -> None:
        """Reject all waiting requests, because the server will not start."""
        self._waited.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._open and scope["type"] == "http" and scope["path"] != LIVEZ:
            if scope["path"] == READYZ:
                return await unready(REASON)(scope, receive, send)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._waited.wait(), self._patience_s)
            if not self._open:
                return await error_response(503, REASON, {"Retry-After": "2"})(scope, receive, send)
        await self._app(scope, receive, send)
