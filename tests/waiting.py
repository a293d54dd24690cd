"""Wait for a condition, with one generous bound for the whole suite.

A test waits for an event, never for a clock: a bound here only turns a hang into a failure. `SKYRL_TEST_PATIENCE=4`
multiplies every bound, on a slow machine.
"""

import os
import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

PATIENCE = float(os.environ.get("SKYRL_TEST_PATIENCE", "1"))
"""Factor of every bound."""
BOUND_S = 60.0 * PATIENCE
"""Seconds that a test waits for anything: pass it as the timeout of joins, futures, queues and requests."""
PAUSE_S = 0.02


class TooLate(TimeoutError):
    """A condition did not become true in time. No wrong value: the test runs again (tests/run.py)."""


def until(condition: Callable[[], Value], what: str, within_s: float = BOUND_S) -> Value:
    """Return the first true value of `condition()`, polled every 20 ms.

    Args:
        condition: Called in this thread.
        what: The awaited fact, for the message: "the engine is ready".
        within_s: Seconds after which it is too late.

    Raises:
        TooLate: It was never true within the bound.
    """
    deadline = time.monotonic() + within_s
    while True:
        if value := condition():
            return value
        if time.monotonic() >= deadline:
            raise TooLate(f"not within {within_s:g} s: {what}")
        time.sleep(PAUSE_S)
