"""ASGI middleware: a gate during the start, checks of a server without keys, and measurement of all requests.

A start may take long, for example while the database is unavailable. Requests wait until the server has started, so a
request during a restart is served normally. The liveness and readiness probes respond at once.

A server without keys answers programs on its machine, but rejects requests of web pages in a browser on this machine.
Any web page can send requests to 127.0.0.1. With a host name that resolves to this address (DNS rebinding), it can also
read the answers. In these cases, the browser sends the page's origin in `Origin` or its host in `Host`. Without
permission from the server, the browser sends only bodies with the media types of HTML forms.

Each request gets a request id, and its duration and status are counted by route.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl.tinker.config import is_loopback
from skyrl.tinker.http.errors import error_response
from skyrl.tinker.http.probes import LIVEZ, READYZ, unready
from skyrl.tinker.http.routes.dependencies import TENANT
from skyrl.utils.log import REQUEST_ID

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


BODY_TYPES = ("application/json", "application/x-protobuf")
"""Accepted media types. A browser sends bodies of these types, and any PUT, to another site only after a preflight
request."""
LOOKED_AT = frozenset({b"host", b"origin", b"content-length", b"transfer-encoding", b"content-type"})
"""Headers that are checked."""
WAY_OUT = "start the server with keys (--api-keys-file, or SKYRL_API_KEYS) to use it from elsewhere"


class LocalOnly:
    """ASGI middleware that rejects requests that a web page in a browser may have sent.

    Args:
        app: The application.
        check_host: True if `Host` must be an address of this machine.
        refuse: Creates a response from a status and a reason.
    """

    def __init__(self, app: ASGIApp, check_host: bool, refuse: Callable[[int, str], ASGIApp]):
        self._app = app
        self._check_host = check_host
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = next(self._objections(scope), None) if scope["type"] == "http" else None
        await (self._app if refusal is None else self._refuse(*refusal))(scope, receive, send)

    def _objections(self, scope: Scope) -> Iterator[tuple[int, str]]:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name in LOOKED_AT}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if self._check_host and not _is_here(host):
            yield 403, f"Host={host[:300]!r} is not this machine, and this server has no keys; {WAY_OUT}"
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            yield 403, f"Origin={origin[:300]!r}: web pages may not use a server without keys; {WAY_OUT}"
        has_body = headers.get(b"content-length", "0") != "0" or b"transfer-encoding" in headers
        media_type = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if has_body and media_type not in BODY_TYPES and scope["method"] != "PUT":
            yield 400, f"Content-Type={media_type[:300]!r} is not read; send {' or '.join(BODY_TYPES)}"


@lru_cache(maxsize=256)
def _is_here(host: str) -> bool:
    """Return True if a `Host` is an address of this machine."""
    return is_loopback(_name(host))


def _name(host: str) -> str:
    """Name in `NAME:PORT` or `[ADDRESS]:PORT`, without the port; empty if the text has neither form."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+))(?::\d+)?", host)
    return (found[1] or found[2]).lower() if found else ""


log = logging.getLogger("skyrl.access")

NO_ROUTE = "none"
"""Route label of requests without a route: unknown paths, and requests that were rejected before routing."""
ID_HEADER = "x-request-id"
GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
"""Pattern of request ids accepted from a client or a proxy. Other ids could inject lines into the log."""


class Measured:
    """Outermost ASGI middleware: assigns request ids, and reports each response to `ServerMetrics`.

    Args:
        app: The application.
        prefix: Path prefix of the API; some versions of FastAPI omit it from a route's path.
        access_log: True to log a line for each response. The line has the route, because the path may have secrets.
    """

    def __init__(self, app: ASGIApp, prefix: str, access_log: bool = False):
        self._app = app
        self._prefix = prefix
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(ID_HEADER, "")
        request_id = given if GIVEN_ID.fullmatch(given) else uuid4().hex
        REQUEST_ID.set(request_id)  # in this request's task, and in tasks that it starts
        began, status, sent = time.perf_counter(), 500, 0  # 500: for exceptions that reach this middleware

        async def noted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (ID_HEADER.encode(), request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), own]}
            else:
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            seconds, route = time.perf_counter() - began, self._template(scope)
            server = scope["app"].state.server
            if server.started:  # before, only `/livez` gets here, and there are no metrics yet
                server.service.metrics.http.answered(scope["method"], route, status, seconds)
            if self._access_log:
                _tell(scope, route, status, sent, seconds)

    def _template(self, scope: Scope) -> str:
        route: str | None = getattr(scope.get("route"), "path", None)
        if route is None:
            return NO_ROUTE
        in_api = scope["path"].startswith(self._prefix) and not route.startswith(self._prefix)
        return self._prefix + route if in_api else route


def _tell(scope: Scope, route: str, status: int, sent: int, seconds: float) -> None:
    fields = {
        "method": scope["method"],
        "route": route,
        "status": status,
        "bytes": sent,
        "ms": round(seconds * 1000, 1),
        "tenant": scope.get(TENANT, "nobody"),
        "address": scope["client"][0] if scope.get("client") else "",
    }
    line = "%(method)s %(route)s %(status)d, %(bytes)d bytes in %(ms).1f ms to %(tenant)s at %(address)s"
    log.info(line, fields, extra={"fields": fields})
