"""HTTP manners that all routes share: bounded bodies, and errors as the SDK reads them.

Every error is `{"detail": "one line"}` with a Content-Length (the SDK takes a 400 without one for a broken proxy and
retries it). 402 and 409 are never sent: the SDK would wait for minutes and try again.
"""

import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DataError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl.errors import RequestError, UnknownName
from skyrl.tinker.parsing import MalformedBody
from skyrl.tinker.service import EngineStarting
from skyrl.tinker.submission import Busy

log = logging.getLogger(__name__)


class BodyLimit:
    """ASGI middleware that stops reading a body at its path's limit and answers 413.

    Args:
        app: The application.
        limit_of: Largest body in bytes for a path.
    """

    def __init__(self, app: ASGIApp, limit_of: Callable[[str], int]):
        self._app = app
        self._limit_of = limit_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit, received = self._limit_of(scope["path"]), 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise HTTPException(413, f"the body is larger than {limit} bytes; send less in one request")
            return message

        await self._app(scope, limited, send)


def error_response(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": " ".join(detail.splitlines())}, status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Answer every exception that a route may raise."""
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(MalformedBody, _status(400))
    app.add_exception_handler(RequestError, _status(400))
    app.add_exception_handler(UnknownName, _status(404))
    app.add_exception_handler(Busy, _status(429))
    app.add_exception_handler(EngineStarting, _starting)
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


def _unstorable(_: Request, __: Exception) -> JSONResponse:
    return error_response(400, "a text or number of the request cannot be stored; send no NUL characters, NaN or inf")


def _gone(_: Request, __: Exception) -> JSONResponse:
    return error_response(400, "the client left before its body had arrived")  # which nobody reads


def _starting(_: Request, error: Exception) -> JSONResponse:
    return error_response(503, f"the engine is not ready yet: {error}", {"Retry-After": "2"})


def _internal_error(request: Request, _: Exception) -> JSONResponse:
    return error_response(
        500, f"internal error ({request.method} {request.url.path}); the server's log has the details"
    )
