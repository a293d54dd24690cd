"""Support of each configuration field with a strategy: it is read, or it is refused.

A table maps paths to what becomes of them; a path stands for every field below it that has no longer one of its own.
Fields of subclasses, which are a user's own, are never refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from skyrl.train.config import BaseConfig, SFTConfig, SkyRLTrainConfig
from skyrl.train.config.machinery.fields import specs_of

OF_POLICY = ("model.", "optimizer_config.")
"""Sections of supervised fine-tuning that are those of a policy."""


class Status(Enum):
    """Status of a field."""

    CONSUMED = "consumed"
    """A module reads it."""
    WHERE_AVAILABLE = "where available"
    """Its default asks for what is not everywhere; what it comes to is logged."""
    REFUSED = "refused"
    """Nothing can honour it, so that only its default is taken."""


@dataclass(frozen=True)
class Support:
    """Support of a field, or of all fields of a section."""

    status: Status
    by: str
    """The module that reads it, or why it is refused and what to do instead."""
    section: str | None = None
    """Name in the module of the section that the field is in, where that is another."""


def consumed(module: str, section: str | None = None) -> Support:
    """`module` reads it, from what it calls `section`."""
    return Support(Status.CONSUMED, module, section)


def where_available(module: str) -> Support:
    """`module` logs what it comes to."""
    return Support(Status.WHERE_AVAILABLE, module)


def refused(why: str) -> Support:
    """Nothing can honour it: `why`, and a way out."""
    return Support(Status.REFUSED, why)


def find(table: Mapping[str, Support], path: str) -> tuple[str, Support]:
    """The longest path in the table that is `path` or a section around it, and what it says. Raises KeyError."""
    where = path
    while where not in table:
        if not where:
            raise KeyError(path)
        where = where.rpartition(".")[0]
    return where, table[where]


def refusal(config: SkyRLTrainConfig | SFTConfig, table: Mapping[str, Support], path: str) -> str | None:
    """Reason why a field is refused, and what to do instead; None if it is not."""
    if isinstance(config, SFTConfig):
        if not path.startswith(OF_POLICY):
            return None
        path = f"trainer.policy.{path}"
    support = find(table, path)[1]
    return support.by if support.status is Status.REFUSED else None


def unsupported(config: SkyRLTrainConfig, table: Mapping[str, Support]) -> Iterator[str]:
    """A message for each field that is not what it is by default and that the table refuses."""
    for path, value in _changed(config, SkyRLTrainConfig(), ""):
        if why := refusal(config, table, path):
            yield f"{path}={value} cannot be honoured with trainer.strategy={config.trainer.strategy}: {why}"


def unsupported_in_sft(config: SFTConfig, table: Mapping[str, Support]) -> Iterator[str]:
    """The same for supervised fine-tuning, whose model and optimizer are those of a policy."""
    for path, value in _changed(config, SFTConfig(), ""):
        if why := refusal(config, table, path):
            yield f"{path}={value} cannot be honoured with strategy={config.strategy}: {why}"


def _changed(config: BaseConfig, defaults: BaseConfig, section: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of the fields that both have and that differ."""
    known = specs_of(type(defaults))
    for name, value in ((name, getattr(config, name)) for name in specs_of(type(config)) if name in known):
        default, where = getattr(defaults, name), f"{section}.{name}" if section else name
        if isinstance(value, BaseConfig):
            yield from _changed(value, known[name].base() if default is None else default, where)
        elif value != default:
            yield where, value
