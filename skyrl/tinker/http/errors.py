"""Shared behavior of all routes: limits on request bodies, and error responses in the form that the SDK expects.

Every error is `{"detail": "one line"}` with a Content-Length (the SDK treats a 400 without it as a broken proxy and
retries). The statuses 402 and 409 are never used, because the SDK would wait for minutes and retry.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DataError, InterfaceError, InternalError, OperationalError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl.errors import RequestError, StorageError, UnknownName
from skyrl.tinker.database.fence import Superseded
from skyrl.tinker.database.retrying_writer import Stopped
from skyrl.tinker.errors import BodyTooLarge, DatabaseFull, EngineStarting, MalformedBody
from skyrl.tinker.wire.codec import too_large_pass
from skyrl.tinker.wire.parsing import BEGINNING_BYTES, brief, describe
from skyrl.tinker.wire.sharing import announced_length
from skyrl.utils.log import REQUEST_ID
from skyrl.utils.quota import Busy

log = logging.getLogger(__name__)

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


def error_response(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": brief(" ".join(detail.splitlines()))}, status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Add a handler for every exception that a route may raise."""
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _bad_parameter)
    app.add_exception_handler(MalformedBody, _status(400))
    app.add_exception_handler(BodyTooLarge, _status(413))
    app.add_exception_handler(RequestError, _status(400))
    app.add_exception_handler(UnknownName, _status(404))
    app.add_exception_handler(Busy, _status(429))
    app.add_exception_handler(EngineStarting, _starting)
    app.add_exception_handler(DatabaseFull, _full)
    app.add_exception_handler(StorageError, _storage)
    app.add_exception_handler(OperationalError, _unreachable)
    app.add_exception_handler(InterfaceError, _unreachable)
    app.add_exception_handler(InternalError, _unreachable)
    app.add_exception_handler(Stopped, _unreachable)
    app.add_exception_handler(Superseded, _unreachable)
    app.add_exception_handler(DataError, _unstorable)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _internal_error)


def _status(status: int) -> Callable[[Request, Any], JSONResponse]:
    def handler(_: Request, error: Exception) -> JSONResponse:
        return error_response(status, str(error))

    return handler


def _http_error(request: Request, error: Any) -> JSONResponse:
    detail = error.detail
    if error.status_code in (404, 405) and detail in ("Not Found", "Method Not Allowed"):
        detail = f"{request.method} {request.url.path} is not served here; check the path and base_url"
    return error_response(error.status_code, str(detail), error.headers)


def _bad_parameter(_: Request, error: Any) -> JSONResponse:
    """Describe an invalid parameter of the URL, without its location ("query", "path")."""
    return error_response(400, describe([{**problem, "loc": problem["loc"][1:]} for problem in error.errors()]))


def _unstorable(_: Request, __: Exception) -> JSONResponse:
    return error_response(400, "a text or number of the request cannot be stored; send no NUL characters, NaN or inf")


def _gone(_: Request, __: Exception) -> JSONResponse:
    return error_response(400, "the client left before its body had arrived")  # which nobody reads


def _starting(_: Request, error: Exception) -> JSONResponse:
    return error_response(503, f"the engine is not ready yet: {error}", {"Retry-After": "2"})


def _full(request: Request, error: Exception) -> JSONResponse:
    _log_refusal(request, error)
    detail = "the disk of the server's database is full, so nothing can be promised; free space there. Send this again"
    return error_response(503, detail, {"Retry-After": "5"})


def _storage(request: Request, error: Exception) -> JSONResponse:
    _log_refusal(request, error)
    reason = request.app.state.server.service.redact(str(error))
    detail = f"the server cannot read or write its files now: {reason}. Send this again"
    return error_response(503, detail, {"Retry-After": "5"})


def _unreachable(request: Request, error: Exception) -> JSONResponse:
    _log_refusal(request, error)
    return error_response(503, "the server's database cannot be reached now. Send this again", {"Retry-After": "2"})


def _log_refusal(request: Request, error: Exception) -> None:
    """Log a rejected request with its route instead of its path, which may contain a secret token."""
    route = getattr(request.scope.get("route"), "path", "a path without a route")
    log.error("%s %s was turned away: %s", request.method, route, error)


def _internal_error(request: Request, _: Exception) -> JSONResponse:
    return error_response(
        500,
        f"internal error ({request.method} {request.url.path}); the server's log has the details at request "
        f"{REQUEST_ID.get()}",
    )
