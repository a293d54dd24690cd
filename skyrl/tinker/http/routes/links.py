"""Links to files on this server. A link works without a key, for at most an hour."""

import time

from fastapi import Request

from skyrl.tinker.context import Service
from skyrl.tinker.identity.callers import Caller

LIFETIME_S = 3600


def end_of_link(caller: Caller) -> int:
    """Expiry of a new link: no later than that of the token of its request, which may have leaked."""
    hour = int(time.time()) + LIFETIME_S
    return hour if caller.expires is None else min(hour, caller.expires)


def link(request: Request, service: Service, route: str, token: str, name: str) -> str:
    """Create a URL of a file on this server, as clients reach it.

    Args:
        request: The request for the link.
        service: The server's shared parts.
        route: Name of the file's route.
        token: Signed description of the file.
        name: Name of the file.
    """
    if service.config.public_url is None:
        return str(request.url_for(route, token=token, name=name))
    return service.config.public_url + request.app.url_path_for(route, token=token, name=name)
