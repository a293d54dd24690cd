"""Measurement of all requests: each gets a request id, and its duration and status are counted by route."""

import logging
import re
import time
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl.utils.log import REQUEST_ID

log = logging.getLogger("skyrl.access")

NO_ROUTE = "none"
"""Route label of requests without a route: unknown paths, and requests that were rejected before routing."""
ID_HEADER = "x-request-id"
GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
"""Pattern of request ids accepted from a client or a proxy. Other ids could inject lines into the log."""
TENANT = "skyrl.tenant"
"""Key in a request's scope: name of the sender, once it is known."""


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
