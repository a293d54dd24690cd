"""Support of a field by backends and servers, as metadata in its annotation.

    fsdp_config: Annotated[FSDPConfig, refused("this is an option of FSDP; leave it out", JAX)]

A field without metadata is read by every strategy. Metadata of a section applies to the fields in it that have none of
their own. With `at`, it applies to the field or section with this path below the section, at this place of the tree
only, and precedes metadata in the class of the section.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from skyrl.config.machinery.fields import Fact, specs_of

JAX, TORCH = "jax", "torch"
"""Backends of the strategies."""


class Status(Enum):
    """Support of a field by a backend."""

    READ = "read"
    """The field has its meaning."""
    WHERE_AVAILABLE = "where available"
    """The default asks for an optional capability. The effective value is logged."""
    REFUSED = "refused"
    """The field is not supported. Only its default is accepted."""


@dataclass(frozen=True)
class Use(Fact):
    """Support of a field, or of all fields of a section, by some backends."""

    status: Status
    by: tuple[str, ...]
    """Backends (JAX, TORCH)."""
    why: str = ""
    """Reason for a rejection, with an alternative."""


@dataclass(frozen=True)
class Sets(Fact):
    """Options of the torch backend that follow from a field. A server accepts such fields, too."""

    options: tuple[str, ...]


@dataclass(frozen=True)
class OfTrainers(Fact):
    """Reason why a server does not accept a field, with an alternative."""

    why: str
    whole: bool
    """True if this also applies to fields of the section from which options follow."""


def read(*by: str, at: str = "") -> Use:
    """Return the metadata of a field that is read, in a section that is not."""
    return Use(at, Status.READ, by)


def refused(why: str, *by: str, at: str = "") -> Use:
    """Return the metadata of a field that is rejected. `why` is the reason, with an alternative."""
    return Use(at, Status.REFUSED, by, why)


def where_available(*by: str, at: str = "") -> Use:
    """Return the metadata of a field whose effective value is logged."""
    return Use(at, Status.WHERE_AVAILABLE, by)


def sets(*options: str, at: str = "") -> Sets:
    """Return the metadata of a field from which options of the torch backend follow."""
    return Sets(at, options)


def of_trainers(why: str, at: str = "", whole: bool = False) -> OfTrainers:
    """Return the metadata of a field that has no meaning for a server."""
    return OfTrainers(at, why, whole)


def use_of(cls: type, path: str, by: str) -> Use:
    """Return the support of the field at `path` in a configuration of class `cls`."""
    uses = [fact for fact in _facts(cls, path) if isinstance(fact, Use) and by in fact.by]
    return uses[-1] if uses else read(by)


def options_set(cls: type, path: str) -> tuple[str, ...]:
    """Return the options of the torch backend that follow from the field at `path`. Empty: none."""
    facts = list(_facts(cls, path))
    if any(isinstance(fact, OfTrainers) and fact.whole for fact in facts):
        return ()
    return next((fact.options for fact in reversed(facts) if isinstance(fact, Sets)), ())


def why_of_trainers(cls: type, path: str) -> str | None:
    """Return the reason why a server does not accept the field at `path`. None if the field has none of its own."""
    return next((fact.why for fact in reversed(list(_facts(cls, path))) if isinstance(fact, OfTrainers)), None)


def _facts(cls: type, path: str) -> Iterator[Fact]:
    """Yield the metadata that applies to a field. Later ones precede."""
    names, placed = path.split("."), list[Fact]()
    owner: Any = cls
    for number, name in enumerate(names, 1):
        if (spec := specs_of(owner).get(name)) is None:
            break
        below = ".".join(names[number:])
        yield from (fact for fact in spec.facts if not fact.at)
        placed += [fact for fact in spec.facts if fact.at and f"{below}.".startswith(f"{fact.at}.")]
        if spec.config_class is None:
            break
        owner = spec.config_class
    yield from placed
