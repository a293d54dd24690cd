"""Checks of a running server, over HTTP."""

import secrets
import time
from email.utils import parsedate_to_datetime
from functools import cached_property

import httpx

from skyrl import __version__
from skyrl.admin.doctor.finding import Finding, ok, problem, warning
from skyrl.tinker.config import is_loopback

PATIENCE_S = 10.0
"""Timeout of a request, in seconds."""
SKEW_S = 60.0
"""Maximum difference between the server's clock and this machine's, in seconds."""


class Server:
    """A server that may be running.

    Args:
        url: Base URL of the server.
        http: HTTP client of the server.
    """

    def __init__(self, url: str, http: httpx.Client):
        self.url = url
        self.http = http

    @cached_property
    def alive(self) -> httpx.Response | str:
        """Response of `livez`, or the reason why there is none."""
        try:
            return self.http.get("/livez", timeout=PATIENCE_S)
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__

    @property
    def answers(self) -> bool:
        """True if the server is running, so other checks can query it."""
        return isinstance(self.alive, httpx.Response) and self.alive.status_code == 200

    @cached_property
    def takes_any_key(self) -> bool:
        """True if the server accepts an invalid key."""
        headers = {"X-API-Key": f"doctor-{secrets.token_hex(16)}"}
        return self.http.post("/api/v1/client/config", json={}, headers=headers, timeout=PATIENCE_S).status_code == 200


def alive(server: Server) -> Finding:
    """Check liveness with `livez`."""
    answer = server.alive
    if isinstance(answer, str):
        return problem(
            f"nothing answers at {server.url}: {answer}",
            "start it (skyrl serve), or correct --base-url; while it starts again, its log says why",
        )
    if answer.status_code != 200:
        return problem(f"{server.url}/livez answers {answer.status_code}: no SkyRL server", "correct --base-url")
    return ok(f"{server.url} answers")


def ready(server: Server) -> Finding | None:
    """Check readiness with `readyz`: the engine sends heartbeats and the database responds."""
    if not server.answers:
        return None
    answer = server.http.get("/readyz", timeout=PATIENCE_S)
    if answer.status_code == 200:
        slow = ", ".join(f"the {name} for {seconds:.0f} s" for name, seconds in answer.json().get("slow", {}).items())
        if slow:
            return warning(f"ready, but services have not answered: {slow}", "its log names the calls, as /status does")
        return ok("the engine and the database work")
    return problem(
        f"{answer.json().get('detail', answer.text)}; what has come is in its log and waits",
        "its log says why; SIGUSR1 makes its processes write there what they are at. An engine that hangs is killed "
        "and started again by itself (--engine-heartbeat-timeout-sec)",
    )


def keys(server: Server) -> Finding | None:
    """Check that a server that others can reach requires a key."""
    if not server.answers:
        return None
    if not server.takes_any_key:
        return ok("who has no key is refused")
    host = httpx.URL(server.url).host
    if is_loopback(host):
        return ok("every key is taken, on an address of this machine")
    return problem(
        f"every key is taken at {host}, so whoever reaches it may use, read and delete everything",
        "start it with --api-keys-file, or listen on 127.0.0.1",
    )


def clocks(server: Server) -> Finding | None:
    """Check the difference between the server's clock and this machine's."""
    if not server.answers or isinstance(server.alive, str) or "date" not in server.alive.headers:
        return None
    skew = abs(parsedate_to_datetime(server.alive.headers["date"]).timestamp() - time.time())
    if skew > SKEW_S:
        return warning(f"the server's clock and this one differ by {skew:.0f} s", "set both by NTP")
    return ok("as this machine's")


def versions(server: Server) -> Finding | None:
    """Compare the version of the server with this installation."""
    if not server.answers:
        return None
    answer = server.http.get("/version", timeout=PATIENCE_S)
    if answer.status_code != 200:
        return warning("the server is of a version that does not tell which", "upgrade it")
    theirs = answer.json()["version"]
    if theirs != __version__:
        return warning(f"the server is {theirs}, this command {__version__}", "use the server's own installation")
    return ok(theirs)


CHECKS = (alive, ready, keys, clocks, versions)
