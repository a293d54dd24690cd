"""Error responses of all routes, in the form that the SDK expects.

Every error is `{"detail": "one line"}` with a Content-Length (the SDK treats a 400 without it as a broken proxy and
retries). The statuses 402 and 409 are never used, because the SDK would wait for minutes and retry.
"""

import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DataError, InterfaceError, InternalError, OperationalError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from skyrl.errors import RequestError, StorageError, UnknownName
from skyrl.tinker.database.fence import Superseded
from skyrl.tinker.database.retrying_writer import Stopped
from skyrl.tinker.errors import BodyTooLarge, DatabaseFull, EngineStarting, MalformedBody
from skyrl.tinker.wire.parsing import brief, describe
from skyrl.utils.log import REQUEST_ID
from skyrl.utils.quota import Busy

log = logging.getLogger(__name__)


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
