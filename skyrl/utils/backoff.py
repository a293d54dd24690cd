"""Pauses before retries."""

import math

MOST_DOUBLINGS = 60


def pause_s(doublings: int, first_s: float, longest_s: float = math.inf) -> float:
    """Return the pause in seconds: `first_s`, doubled `doublings` times, up to `longest_s`."""
    return min(first_s * 2 ** min(doublings, MOST_DOUBLINGS), longest_s)
