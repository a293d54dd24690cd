"""Suggestions of similar names for error messages about unknown names."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to `name`, ignoring case; None if none is similar."""
    names = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), names, n=1)
    return names[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: a suggestion, or an empty string."""
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {near}?"
