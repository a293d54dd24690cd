"""A clock that stands still until a test moves it, and whether a backend that waits is asleep."""

from skyrl.backends.executor import Executor


class Clock:
    """Seconds that a test decides on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def sleeps(backend: Executor, seconds: float) -> int:
    """Wait so long for a backend that has nothing to do. Return how often it went to sleep meanwhile.

    Once is enough. A driver that polls, or that somebody wakes in vain, sleeps many times.
    """
    condition, times = backend._wake, 0
    wait = condition.wait

    def counted(timeout: float | None = None) -> bool:
        nonlocal times
        times += 1
        return wait(timeout)

    condition.wait = counted
    try:
        assert not backend.wait(seconds), "it has something to do"
    finally:
        condition.wait = wait
    return times
