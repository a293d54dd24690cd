"""Calls to services that may hang: buckets, databases, sampling engines and model hubs.

A call that takes longer than expected is logged, and `slow_calls` lists it until it ends.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

log = logging.getLogger(__name__)

Service = Literal["bucket", "database", "sampling engine", "model hub"]
SERVICES: tuple[Service, ...] = get_args(Service)

EXPECTED_S = 30.0
"""Seconds that a call may take before it counts as slow."""
RATE = 2**20
"""Bytes that a transfer is expected to move per second at least."""
INTERVAL_S = 1.0
"""Seconds between two checks of all calls."""


class SlowCall(NamedTuple):
    """A call in progress that has taken longer than expected."""

    service: Service
    what: str
    """Description of the call for the log, with the address of the service but without secrets."""
    seconds: float
    """Duration so far."""

    def __str__(self) -> str:
        """Description for clients, without the address."""
        return f"the {self.service}, for {self.seconds:.0f} s so far"


class _Call:
    def __init__(self, service: Service, what: str, expected_s: float):
        self.service: Service = service
        self.what = what
        self.began = time.monotonic()
        self.warn_after_s = self.expected_s = expected_s

    def seen(self, now: float) -> SlowCall:
        return SlowCall(self.service, self.what, now - self.began)


_calls: dict[int, _Call] = {}
"""Calls in progress."""
_starting = threading.Lock()
_watch: threading.Thread | None = None


@contextmanager
def calling(service: Service, what: str, nbytes: int = 0) -> Iterator[None]:
    """Context of one call. Call it in the thread or task that waits for the answer.

    Args:
        service: Kind of the service.
        what: Description of the call; see `SlowCall.what`.
        nbytes: Number of bytes that the call transfers, which lengthens the expected duration.
    """
    call = _Call(service, what, EXPECTED_S + nbytes / RATE)
    _calls[id(call)] = call
    _start_watch()
    try:
        yield
    finally:
        del _calls[id(call)]
        if call.warn_after_s > call.expected_s:
            log.warning("the %s was waited for, for %.0f s: %s", service, time.monotonic() - call.began, what)


def slow_calls() -> tuple[SlowCall, ...]:
    """Return the calls in progress that have taken longer than expected, slowest first."""
    now = time.monotonic()
    found = [call.seen(now) for call in list(_calls.values()) if now - call.began > call.expected_s]
    return tuple(sorted(found, key=lambda call: -call.seconds))


def _start_watch() -> None:
    global _watch
    if _watch is None or not _watch.is_alive():  # a fork keeps no threads
        with _starting:
            if _watch is None or not _watch.is_alive():
                _watch = threading.Thread(target=_warn, name="slow calls", daemon=True)
                _watch.start()


def _warn() -> None:
    """Log each slow call, at intervals that double."""
    never = threading.Event()
    while not never.wait(INTERVAL_S):
        now = time.monotonic()
        for call in list(_calls.values()):
            if now - call.began > call.warn_after_s:
                call.warn_after_s = 2 * (now - call.began)
                log.warning("the %s has not answered for %.0f s: %s", call.service, now - call.began, call.what)
