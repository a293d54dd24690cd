"""Plan and execution: which cases run, in which order, until when.

Time is short, so the order is one of worth: what was never run to its end comes first, then what has failed, and a case
is started only if the seconds that it is expected to take are left. `execute` writes nothing itself; it tells each
outcome as it comes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from skyrl.errors import ConfigError

from .case import Case
from .process import CUT_SHORT, OK, TIMED_OUT, GroupProcess, Outcome


class Planned(NamedTuple):
    """A case and what is going to happen to it."""

    case: Case
    fits: bool
    """It is expected to run."""
    note: str


def choose(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Cases that one of the names is part of (in any case of letters), or is the group of. No names: all cases.

    Raises ConfigError for a name that fits none.
    """
    for name in names:
        if not any(_is_meant(case, name) for case in cases):
            groups = ", ".join(dict.fromkeys(case.group for case in cases))
            known = "\n".join(f"  {case.name}" for case in cases)
            raise ConfigError(f"--only {name}: no case and no group of that name; groups: {groups}; cases:\n{known}")
    return [case for case in cases if not names or any(_is_meant(case, name) for name in names)]


def _is_meant(case: Case, name: str) -> bool:
    return name.lower() in case.name.lower() or name == case.group


def in_order(cases: Sequence[Case], statuses: Mapping[str, str]) -> list[Case]:
    """Cases that are not done: first those that have not come to an end, then those that have failed."""
    failed = [case for case in cases if statuses.get(case.name, CUT_SHORT) not in (OK, CUT_SHORT)]
    return [case for case in cases if statuses.get(case.name, CUT_SHORT) == CUT_SHORT] + failed


def plan(cases: Sequence[Case], statuses: Mapping[str, str], budget_s: float) -> list[Planned]:
    """Each case, those that are done first.

    Args:
        cases: In order of worth.
        statuses: Last status of the cases that were run before, by name.
        budget_s: Seconds for all.
    """
    planned = [Planned(case, False, "done") for case in cases if statuses.get(case.name) == OK]
    left = budget_s
    for case in in_order(cases, statuses):
        fits = case.estimate_s <= left
        left -= case.estimate_s if fits else 0.0
        before = f"was {statuses[case.name]}" if case.name in statuses else ""
        planned.append(Planned(case, fits, before if fits else "does not fit"))
    return planned


def execute(cases: Sequence[Case], deadline: float, tell: Callable[[Case, Outcome], Any]) -> None:
    """Run cases in their order, as far as there is time, each group in a process of its own.

    Args:
        cases: To be run.
        deadline: End of the budget, a time of `time.monotonic()`.
        tell: Takes each outcome, as soon as it is known. A case that an interrupt ends is cut short.
    """
    process, group = None, None
    try:
        for case in cases:
            if case.estimate_s > deadline - time.monotonic():
                continue
            if process is not None and not (process.usable and group == case.group):
                process.close()
                process = None
            if process is None:
                process, group = GroupProcess(), case.group
            tell(case, _run(process, case, deadline - time.monotonic(), tell))
    finally:
        if process is not None:
            process.close()


def _run(process: GroupProcess, case: Case, left_s: float, tell: Callable[[Case, Outcome], Any]) -> Outcome:
    begun = time.monotonic()
    try:
        outcome = process.run(case, min(case.limit_s, left_s))
    except KeyboardInterrupt:
        tell(case, Outcome(CUT_SHORT, time.monotonic() - begun, error="interrupted"))
        raise
    if outcome.status != TIMED_OUT:
        return outcome
    if left_s < case.limit_s:
        return outcome._replace(status=CUT_SHORT, error="the time for all cases was up")
    return outcome._replace(error=f"it took longer than its limit of {case.limit_s:g} s")
