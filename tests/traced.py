"""Memory that work takes, by counts of the whole process: other threads, of earlier tests too, add what is theirs."""

from collections.abc import Callable


def least(measure: Callable[[], int], bound: float, tries: int = 3) -> int:
    """Return the least of several measurements, or the first one below `bound`."""
    found = measure()
    for _ in range(tries - 1):
        if found >= bound:
            found = min(found, measure())
    return found
