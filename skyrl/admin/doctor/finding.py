"""Findings: results of the checks of `skyrl doctor`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Create it with `ok`, `warning` or `problem`.
    """

    level: Literal["ok", "warning", "problem"]
    """A problem prevents normal operation; a warning may become a problem."""
    seen: str
    remedy: str = ""
    """Advice for a fix; empty if the check passed."""


@dataclass(frozen=True)
class CheckFinding:
    """A finding with the name of its check."""

    check: str
    finding: Finding


def ok(seen: str) -> Finding:
    """Return the finding of a passed check."""
    return Finding("ok", seen)


def warning(seen: str, remedy: str) -> Finding:
    """Return a finding about something that works now but may fail later or in some cases."""
    return Finding("warning", seen, remedy)


def problem(seen: str, remedy: str) -> Finding:
    """Return a finding about something that does not work."""
    return Finding("problem", seen, remedy)


def examine(
    checks: Sequence[Callable[[Subject], Finding | None]], subject: Subject, skipped: Sequence[str] = ()
) -> list[CheckFinding]:
    """Return the findings of all checks except those `skipped`. A check that does not apply returns None.

    If a check raises an exception, the finding is a problem, and the other checks still run.
    """
    found: list[CheckFinding] = []
    for check in checks:
        name = name_of(check)
        if name in skipped:
            continue
        try:
            finding = check(subject)
        except Exception as error:  # whatever it is, other checks may show the cause
            finding = problem(f"the check itself failed: {type(error).__name__}: {error}", "see what else is wrong")
        if finding is not None:
            found.append(CheckFinding(name, finding))
    return found


def name_of(check: Callable[..., object]) -> str:
    """Return the name under which users see a check."""
    return check.__name__.replace("_", "-")
