"""Links that this server hands out. Whoever has one may use it, without a key, for an hour at most."""

import time

from fastapi import Request

from skyrl.tinker.context import Service
from skyrl.tinker.identity.callers import Caller

LIFETIME_S = 3600


def end_of_link(caller: Caller) -> int:
    """Expiry of a link that is made now: no later than the token that asks for it, which may have leaked."""
    hour = int(time.time()) + LIFETIME_S
    return hour if caller.expires is None else min(hour, caller.expires)


def link(request: Request, service: Service, route: str, token: str, name: str) -> str:
    """A URL of a file on this server, as its clients reach it.

    Args:
        request: The request for it.
        service: The server's parts.
        route: Name of the route of the file.
        token: What the link is for, signed.
        name: Name of the file.
    """
    if service.config.public_url is None:
        return str(request.url_for(route, token=token, name=name))
    return service.config.public_url + request.app.url_path_for(route, token=token, name=name)
