"""Nearest names: the ends of messages about names that are not known."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`, without regard to case; None if none is near."""
    names = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), names, n=1)
    return names[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or nothing if none is near."""
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {near}?"
