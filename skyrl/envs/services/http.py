"""Requests to servers that environments need. A server that fails is an `EnvError`, never a reward."""

import asyncio
import functools
import ssl
from collections.abc import Mapping
from typing import Any

import httpx

from skyrl.envs.env import EnvError
from skyrl.utils.backoff import pause_s

ATTEMPTS = 3
FIRST_DELAY_S = 0.5
"""Pause after the first failure; each further one is twice as long."""
TEMPORARY = {408, 425, 429, 500, 502, 503, 504}
"""Statuses with which the same request may succeed a little later."""


class StatusError(EnvError):
    """A server answered that it does not do what it was asked."""

    def __init__(self, message: str, status: int, text: str):
        super().__init__(message)
        self.status = status
        self.text = text


@functools.cache
def _certificates() -> ssl.SSLContext:
    # Reading them takes longer than most requests, and every episode has a client.
    return httpx.create_ssl_context()


def http_client(timeout_s: float) -> httpx.AsyncClient:
    """A client for one episode, to be closed with it."""
    return httpx.AsyncClient(timeout=timeout_s, verify=_certificates())


async def post_json(
    client: httpx.AsyncClient, url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Any:
    """The JSON that `url` answers to the JSON `body`. Tries temporary failures again.

    Raises EnvError, which names the address, for a server that cannot be reached or answers something else, and its
    subclass StatusError for a status that is no success.
    """
    problem, response = "", None
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(pause_s(attempt - 1, FIRST_DELAY_S))
        try:
            response = await client.post(url, json=body, headers=dict(headers or {}))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem, response = f"{type(error).__name__}: {error}", None
            continue
        if response.is_success:
            try:
                return response.json()
            except ValueError as error:
                raise EnvError(f"{url} answered no JSON: {response.text[:200]!r}") from error
        problem = f"status {response.status_code}: {response.text[:200]!r}"
        if response.status_code not in TEMPORARY:
            break
    message = f"{url} failed ({problem}); is the server running, and is its address right?"
    raise EnvError(message) if response is None else StatusError(message, response.status_code, response.text)
