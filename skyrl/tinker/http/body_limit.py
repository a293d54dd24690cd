"""Limits on request bodies: their size by path, and the rate at which they arrive."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl.tinker.errors import BodyTooLarge
from skyrl.tinker.wire.codec import too_large_pass
from skyrl.tinker.wire.parsing import BEGINNING_BYTES
from skyrl.tinker.wire.sharing import announced_length

PATIENCE_S = 60.0
"""Seconds without a byte after which an incomplete body is rejected. Clients have a timeout of the same length."""
MIN_BYTES_PER_S = 2**14
"""Minimum average rate of a body after the first `PATIENCE_S`."""

UNTIL_ANSWERED = "skyrl.until_answered"
"""Key in a request's scope: an `ExitStack` of resources that are released after the request is answered."""


class BodyLimit:
    """ASGI middleware with limits on bodies: 413 above the size limit of the path, 408 for a body that stalls or is too
    slow.

    If `has_place` returns True for the path, the beginning of a body above the size limit is read, because it may
    contain the request's position in a model's order.

    Each request gets a stack, `scope[UNTIL_ANSWERED]`, of resources that are released after it is answered. FastAPI
    dependencies with `yield` would do the same, but take a tenth of the time of a small request.

    Args:
        app: The application.
        limit_of: Returns the largest body in bytes for a path.
        patience_s: Maximum seconds between two pieces of a body.
        has_place: Returns True if requests of a path have a position in a model's order.
    """

    def __init__(
        self,
        app: ASGIApp,
        limit_of: Callable[[str], int],
        patience_s: float = PATIENCE_S,
        has_place: Callable[[str], bool] = lambda _: False,
    ):
        self._app = app
        self._limit_of = limit_of
        self._patience_s = patience_s
        self._has_place = has_place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit, size, complete = self._limit_of(scope["path"]), 0, False
        has_place = self._has_place(scope["path"])
        start = asyncio.get_running_loop().time()
        announced = announced_length(scope)

        async def limited() -> Message:
            nonlocal size, complete
            if announced > limit and (not has_place or size >= BEGINNING_BYTES):
                raise _too_large(limit, b"" if has_place else None)
            now = asyncio.get_running_loop().time()
            left_s = start + self._patience_s + size / MIN_BYTES_PER_S - now
            try:
                async with asyncio.timeout(None if complete else min(self._patience_s, left_s)):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, _too_slow(size, now - start, self._patience_s)) from None
            complete |= not message.get("more_body", False)
            size += len(piece := message.get("body", b""))
            if size > limit:
                raise _too_large(limit, piece if has_place else None)
            return message

        with ExitStack() as held:
            scope[UNTIL_ANSWERED] = held
            await self._app(scope, limited, send)


def _too_slow(size: int, seconds: float, patience_s: float) -> str:
    return (
        f"{size} bytes of the body came in {seconds:.0f} s, then no more; send the whole body, without a pause of "
        f"{patience_s:g} s and at {MIN_BYTES_PER_S} bytes per second or more"
    )


def _too_large(limit: int, beginning: bytes | None) -> BodyTooLarge:
    if beginning is None:
        return BodyTooLarge(f"the body is larger than {limit} bytes; send less in one request")
    return BodyTooLarge(too_large_pass(limit), beginning)
