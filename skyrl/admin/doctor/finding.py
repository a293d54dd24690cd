"""Findings: outcomes of the checks of `skyrl doctor`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Use `ok`, `warning` and `problem` to make one.
    """

    level: Literal["ok", "warning", "problem"]
    """A problem keeps a server from working as it should; a warning may become one."""
    seen: str
    remedy: str = ""
    """Action that mends it; empty if all is well."""


@dataclass(frozen=True)
class Named:
    """A finding, and the check that made it."""

    check: str
    finding: Finding


def ok(seen: str) -> Finding:
    """All is well."""
    return Finding("ok", seen)


def warning(seen: str, remedy: str) -> Finding:
    """It works, and may not for long or not for all."""
    return Finding("warning", seen, remedy)


def problem(seen: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding("problem", seen, remedy)


def examine(
    checks: Sequence[Callable[[Subject], Finding | None]], subject: Subject, skipped: Sequence[str] = ()
) -> list[Named]:
    """Findings of all checks but those `skipped`, by name; a check that has nothing to look at says None.

    One that fails itself is told as a problem, and the others go on.
    """
    found: list[Named] = []
    for check in checks:
        name = name_of(check)
        if name in skipped:
            continue
        try:
            finding = check(subject)
        except Exception as error:  # whatever it is, the other checks may say why
            finding = problem(f"the check itself failed: {type(error).__name__}: {error}", "see what else is wrong")
        if finding is not None:
            found.append(Named(name, finding))
    return found


def name_of(check: Callable[..., object]) -> str:
    """Name of a check, as users know it."""
    return check.__name__.replace("_", "-")
