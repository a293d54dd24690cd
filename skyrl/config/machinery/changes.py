"""Settings in which two configurations differ, or in which one differs from the defaults."""

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl.config.machinery.base import BaseConfig
from skyrl.config.machinery.fields import specs_of

RESUMING = ("resume_mode", "resume_path", "resume_from")
"""Settings that say from where a run starts. They are not compared, because a resumed run has other values."""


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a text such as "trainer.seed=1, now 2" for each setting that both have, with different values."""
    one, other = dict(leaves(before)), dict(leaves(now))
    return [f"{name}={one[name]}, now {other[name]}" for name in other if name in one and one[name] != other[name]]


def leaves(settings: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every setting except those in `RESUMING`."""
    for name, value in settings.items():
        if name in RESUMING:
            continue
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{section}{name}.")
        else:
            yield f"{section}{name}", value


def changed_fields(config: BaseConfig, defaults: BaseConfig, section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value in `config`) of each field that both configurations have, with different values."""
    known = specs_of(type(defaults))
    for name, value in ((name, getattr(config, name)) for name in specs_of(type(config)) if name in known):
        default, where = getattr(defaults, name), f"{section}{name}"
        if isinstance(value, BaseConfig):
            yield from changed_fields(value, known[name].base() if default is None else default, f"{where}.")
        elif value != default:
            yield where, value
