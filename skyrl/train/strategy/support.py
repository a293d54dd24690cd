"""Support of each configuration field by a strategy: the field is either read or rejected.

A table maps paths to their support. The entry of a section applies to all fields below it without an entry of their
own. Fields that users add in subclasses are never rejected.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from skyrl.train.config import BaseConfig, SFTConfig, SkyRLTrainConfig
from skyrl.train.config.machinery.fields import specs_of

OF_POLICY = ("model.", "optimizer_config.")
"""Sections of a supervised fine-tuning configuration that correspond to sections of the policy."""


class Status(Enum):
    """Status of a field."""

    CONSUMED = "consumed"
    """A module reads the field."""
    WHERE_AVAILABLE = "where available"
    """The default asks for an optional capability; the effective value is logged."""
    REFUSED = "refused"
    """The field is not supported: only its default is accepted."""


@dataclass(frozen=True)
class Support:
    """Support of a field, or of all fields of a section."""

    status: Status
    by: str
    """Module that reads the field, or the reason for the rejection with an alternative."""
    section: str | None = None
    """Name that the module uses for the section of the field, if it differs."""


def consumed(module: str, section: str | None = None) -> Support:
    """Return the support of a field that `module` reads. `section`: the module's own name for the field's section."""
    return Support(Status.CONSUMED, module, section)


def where_available(module: str) -> Support:
    """Return support of a field whose effective value `module` logs."""
    return Support(Status.WHERE_AVAILABLE, module)


def refused(why: str) -> Support:
    """Return the rejection of a field with the reason `why`, which includes an alternative."""
    return Support(Status.REFUSED, why)


def find(table: Mapping[str, Support], path: str) -> tuple[str, Support]:
    """Return the longest path in the table that is `path` or contains it, and its support. Raises KeyError."""
    where = path
    while where not in table:
        if not where:
            raise KeyError(path)
        where = where.rpartition(".")[0]
    return where, table[where]


def refusal(config: SkyRLTrainConfig | SFTConfig, table: Mapping[str, Support], path: str) -> str | None:
    """Return the reason why a field is rejected, with an alternative; None if the field is supported."""
    if isinstance(config, SFTConfig):
        if not path.startswith(OF_POLICY):
            return None
        path = f"trainer.policy.{path}"
    support = find(table, path)[1]
    return support.by if support.status is Status.REFUSED else None


def unsupported(config: SkyRLTrainConfig, table: Mapping[str, Support]) -> Iterator[str]:
    """Yield a message for each field that differs from its default and that the table rejects."""
    for path, value in _changed(config, SkyRLTrainConfig(), ""):
        if why := refusal(config, table, path):
            yield f"{path}={value} cannot be honoured with trainer.strategy={config.trainer.strategy}: {why}"


def unsupported_in_sft(config: SFTConfig, table: Mapping[str, Support]) -> Iterator[str]:
    """Yield the messages of `unsupported` for supervised fine-tuning. Its model and optimizer fields are a policy's."""
    for path, value in _changed(config, SFTConfig(), ""):
        if why := refusal(config, table, path):
            yield f"{path}={value} cannot be honoured with strategy={config.strategy}: {why}"


def _changed(config: BaseConfig, defaults: BaseConfig, section: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of the fields that exist in both and differ."""
    known = specs_of(type(defaults))
    for name, value in ((name, getattr(config, name)) for name in specs_of(type(config)) if name in known):
        default, where = getattr(defaults, name), f"{section}.{name}" if section else name
        if isinstance(value, BaseConfig):
            yield from _changed(value, known[name].base() if default is None else default, where)
        elif value != default:
            yield where, value
