"""Short pauses in long work of a thread, so that the event loop can run.

NumPy calls release the interpreter lock often, but the thread reacquires it before a waiting thread has woken up. The
waiting thread then restarts its wait, and could starve until the work ends. Therefore, a thread with long work sleeps
briefly at intervals.
"""

import time

WORK_S = 0.002
"""Seconds of work between two pauses."""
PAUSE_S = 0.00005
"""Seconds of a pause: long enough for a waiting thread to wake up."""


class Pace:
    """Pauses the thread if a pause is due. Call after each short part of the work."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def __call__(self) -> None:
        if time.perf_counter() - self._since >= WORK_S:
            time.sleep(PAUSE_S)
            self._since = time.perf_counter()
