"""Protection of a server without keys: it answers programs on its machine, but rejects requests of web pages in a
browser on this machine.

Any web page can send requests to 127.0.0.1. With a host name that resolves to this address (DNS rebinding), it can also
read the answers. In these cases, the browser sends the page's origin in `Origin` or its host in `Host`. Without
permission from the server, the browser sends only bodies with the media types of HTML forms.
"""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl.tinker.config import is_loopback

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
