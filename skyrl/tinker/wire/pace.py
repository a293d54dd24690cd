"""Long work in a thread that lets the event loop go on.

A thread that calls NumPy lets go of the interpreter very often, and has it back before another that waits for it has
woken up, which then begins to wait anew: it may wait for the whole work. So long work pauses for a moment now and then.
"""

import time

WORK_S = 0.002
"""Seconds of work between two pauses."""
PAUSE_S = 0.00005
"""Seconds of a pause: long enough for a thread that waits to be woken up."""


class Pace:
    """To be called after each part of the work, none of which takes long."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def __call__(self) -> None:
        if time.perf_counter() - self._since >= WORK_S:
            time.sleep(PAUSE_S)
            self._since = time.perf_counter()
