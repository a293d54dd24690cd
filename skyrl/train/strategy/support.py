"""Support of each configuration field by a strategy. A field is either read or rejected.

A table maps the paths of fields and sections to their support. The entry of a section applies to all fields in it that
have no entry of their own. Fields that users add in subclasses are never rejected.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from skyrl.train.config import BaseConfig, SFTConfig, SkyRLTrainConfig
from skyrl.train.config.machinery.fields import specs_of

OF_POLICY = ("model.", "optimizer_config.")
"""Sections of a supervised fine-tuning configuration that `trainer.policy` has too."""


class Status(Enum):
    """Kinds of support of a field."""

    CONSUMED = "consumed"
    """A module reads the field."""
    WHERE_AVAILABLE = "where available"
    """The default asks for an optional capability. The effective value is logged."""
    REFUSED = "refused"
    """The field is not supported. Only its default is accepted."""


@dataclass(frozen=True)
class Support:
    """Support of a field, or of all fields of a section."""

    status: Status
    by: str
    """Module that reads the field. If the field is rejected, the reason, with an alternative."""
    section: str | None = None
    """Name by which the module calls the field's section, if it is another name."""


def consumed(module: str, section: str | None = None) -> Support:
    """Return the support of a field that `module` reads. For `section`, see `Support.section`."""
    return Support(Status.CONSUMED, module, section)


def where_available(module: str) -> Support:
    """Return the support of a field whose effective value is logged by `module`."""
    return Support(Status.WHERE_AVAILABLE, module)


def refused(why: str) -> Support:
    """Return the support of a field that is rejected. `why` is the reason, with an alternative."""
    return Support(Status.REFUSED, why)


def find(table: Mapping[str, Support], path: str) -> tuple[str, Support]:
    """Return the entry of `path` in the table, or of the innermost section that contains it, and its support.

    Raises KeyError if there is no such entry.
    """
    where = path
    while where not in table:
        if not where:
            raise KeyError(path)
        where = where.rpartition(".")[0]
    return where, table[where]


def refusal(config: SkyRLTrainConfig | SFTConfig, table: Mapping[str, Support], path: str) -> str | None:
    """Return the reason why a field is rejected, with an alternative. None if the field is supported."""
    if isinstance(config, SFTConfig):
        if not path.startswith(OF_POLICY):
            return None
        path = f"trainer.policy.{path}"
    support = find(table, path)[1]
    return support.by if support.status is Status.REFUSED else None


def unsupported(config: SkyRLTrainConfig, table: Mapping[str, Support]) -> Iterator[str]:
    """Yield a message for each field that the table rejects and whose value differs from the default."""
    for path, value in _changed(config, SkyRLTrainConfig(), ""):
        if why := refusal(config, table, path):
            yield f"{path}={value} cannot be honoured with trainer.strategy={config.trainer.strategy}: {why}"


def unsupported_in_sft(config: SFTConfig, table: Mapping[str, Support]) -> Iterator[str]:
    """Yield such messages for supervised fine-tuning. Only model and optimizer are checked, by the policy's entries."""
    for path, value in _changed(config, SFTConfig(), ""):
        if why := refusal(config, table, path):
            yield f"{path}={value} cannot be honoured with strategy={config.strategy}: {why}"


def _changed(config: BaseConfig, defaults: BaseConfig, section: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value in `config`) of each field that both configurations have, with different values."""
    known = specs_of(type(defaults))
    for name, value in ((name, getattr(config, name)) for name in specs_of(type(config)) if name in known):
        default, where = getattr(defaults, name), f"{section}.{name}" if section else name
        if isinstance(value, BaseConfig):
            yield from _changed(value, known[name].base() if default is None else default, where)
        elif value != default:
            yield where, value
