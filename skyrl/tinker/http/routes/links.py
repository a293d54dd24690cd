"""Links to files on this server. A link works without a key, for at most an hour."""

import time

from fastapi import Request

from skyrl.tinker.context import Service
from skyrl.tinker.identity.callers import Caller

LIFETIME_S = 3600


def end_of_link(caller: Caller) -> int:
    """Unix time at which a new link expires.

    A link that is requested with a token expires no later than the token, because the token may have leaked.
    """
    hour = int(time.time()) + LIFETIME_S
    return hour if caller.expires is None else min(hour, caller.expires)


def link(request: Request, service: Service, route: str, token: str, name: str) -> str:
    """Return the URL at which clients reach a file of this server.

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
