"""Pauses before what has failed is tried again."""

import math

MOST_DOUBLINGS = 60


def pause_s(doublings: int, first_s: float, longest_s: float = math.inf) -> float:
    """Seconds to wait: `first_s`, doubled so many times, but `longest_s` at most."""
    return min(first_s * 2 ** min(doublings, MOST_DOUBLINGS), longest_s)
