"""Differences between two configurations, by the paths of their settings."""

from collections.abc import Iterator, Mapping
from typing import Any

RESUMING = ("resume_mode", "resume_path", "resume_from")
"""Settings that say where a run begins, and are others each time."""


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Settings that have other values now, such as "trainer.seed=1, now 2". Of those that both have."""
    one, other = dict(leaves(before)), dict(leaves(now))
    return [f"{name}={one[name]}, now {other[name]}" for name in other if name in one and one[name] != other[name]]


def leaves(settings: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every setting, but those of where a run begins."""
    for name, value in settings.items():
        if name in RESUMING:
            continue
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{section}{name}.")
        else:
            yield f"{section}{name}", value
