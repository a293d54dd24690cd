"""Requests begin in fair shares of the interpreter (`skyrl.tinker.wire.loop_time`), whatever they ask for."""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl.tinker.wire.loop_time import LoopTime


class FairStart:
    """ASGI middleware: while the event loop is behind, requests of those who take most of it wait.

    Args:
        app: The application.
        loop_time: What everybody has taken.
        sender_of: Whom a request is charged to; None: to nobody, and it does not wait.
    """

    def __init__(self, app: ASGIApp, loop_time: LoopTime, sender_of: Callable[[Scope], str | None]):
        self._app = app
        self._loop_time = loop_time
        self._sender_of = sender_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = self._sender_of(scope) if scope["type"] == "http" else None
        if sender is None:
            return await self._app(scope, receive, send)
        await self._loop_time.turn(sender)
        await self._loop_time.charged(sender, self._app(scope, receive, send))
