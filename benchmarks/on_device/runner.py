"""Plan and execution: selection and order of cases within a time limit.

Cases that were never completed come first, in order of importance, then failed ones. A case is started only if its
expected seconds are left. `execute` writes nothing itself; it reports each outcome when it is known.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from skyrl.errors import ConfigError

from .case import Case
from .process import CUT_SHORT, OK, TIMED_OUT, GroupProcess, Outcome

MOST_DEATHS = 2
"""Number of processes that a group may lose before its other cases are postponed to the end."""


class Planned(NamedTuple):
    """A case and its planned treatment."""

    case: Case
    fits: bool
    """True if it is expected to run."""
    note: str
    seconds: float = 0.0
    """Estimate, including the start of a process if it needs one."""


def choose(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Select cases by part of their name (case-insensitive) or by group. Without names, all cases.

    Raises ConfigError for a name without matches.
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
    """Cases that are not done: first those that were not completed, then those that failed."""
    failed = [case for case in cases if statuses.get(case.name, CUT_SHORT) not in (OK, CUT_SHORT)]
    return [case for case in cases if statuses.get(case.name, CUT_SHORT) == CUT_SHORT] + failed


def plan(cases: Sequence[Case], statuses: Mapping[str, str], budget_s: float) -> list[Planned]:
    """Plan all cases, those that are done first.

    Args:
        cases: Cases in order of importance.
        statuses: Last status of cases that ran before, by name.
        budget_s: Seconds for all cases.
    """
    planned = [Planned(case, False, "done") for case in cases if statuses.get(case.name) == OK]
    left, group = budget_s, None
    for case in in_order(cases, statuses):
        needed = case.estimate_s + (case.start_s if case.group != group else 0.0)
        fits = needed <= left
        if fits:
            left, group = left - needed, case.group
        before = f"was {statuses[case.name]}" if case.name in statuses else ""
        planned.append(Planned(case, fits, before if fits else "does not fit", needed))
    return planned


def execute(cases: Sequence[Case], deadline: float, tell: Callable[[Case, Outcome], Any]) -> None:
    """Run cases in order while time is left, each group in a separate process.

    A group whose processes die repeatedly is postponed to the end, because each restart costs time.

    Args:
        cases: Cases to run.
        deadline: End of the budget, a time of `time.monotonic()`.
        tell: Called with each outcome as soon as it is known. A case ended by an interrupt is cut short.
    """
    process, group = None, None
    deaths: Counter[str] = Counter()
    postponed: list[Case] = []
    try:
        for case in chain(cases, postponed):
            if deaths[case.group] >= MOST_DEATHS and case not in postponed:
                postponed.append(case)
                continue
            warm = process is not None and process.usable and group == case.group
            start_s = 0.0 if warm else case.start_s
            if case.estimate_s + start_s > deadline - time.monotonic():
                continue
            if process is not None and not warm:
                process.close()
                process = None
            if process is None:
                process, group = GroupProcess(), case.group
            tell(case, _run(process, case, case.limit_s + start_s, deadline - time.monotonic(), tell))
            deaths[case.group] += not process.usable
    finally:
        if process is not None:
            process.close()


def _run(
    process: GroupProcess, case: Case, limit_s: float, left_s: float, tell: Callable[[Case, Outcome], Any]
) -> Outcome:
    begun = time.monotonic()
    try:
        outcome = process.run(case, min(limit_s, left_s))
    except KeyboardInterrupt:
        tell(case, Outcome(CUT_SHORT, time.monotonic() - begun, error="interrupted"))
        raise
    if outcome.status != TIMED_OUT:
        return outcome
    if left_s < limit_s:
        return outcome._replace(status=CUT_SHORT, error="the time for all cases was up")
    return outcome._replace(error=f"it took longer than its limit of {limit_s:g} s")
