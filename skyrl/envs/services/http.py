"""HTTP requests to servers that environments use. A server failure is an `EnvError`, never a reward."""

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
"""Pause after the first failure, in seconds. It doubles after each further failure."""
TEMPORARY = {408, 425, 429, 500, 502, 503, 504}
"""HTTP statuses for which a retry may succeed."""


class StatusError(EnvError):
    """Response of a server with an error status."""

    def __init__(self, message: str, status: int, text: str):
        super().__init__(message)
        self.status = status
        self.text = text


@functools.cache
def _certificates() -> ssl.SSLContext:
    # Cached: loading them takes longer than most requests, and every episode has its own client.
    return httpx.create_ssl_context()


def http_client(timeout_s: float) -> httpx.AsyncClient:
    """Create a client for one episode. The episode closes it."""
    return httpx.AsyncClient(timeout=timeout_s, verify=_certificates())


async def post_json(
    client: httpx.AsyncClient, url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Any:
    """POST the JSON `body` to `url` and return the JSON response. Retries temporary failures.

    Raises EnvError with the URL if the server is unreachable or the response is not JSON. For an error status, raises
    the subclass StatusError.
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
