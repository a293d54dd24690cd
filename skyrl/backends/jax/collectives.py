"""Data that devices exchange in a compiled program, from the program's text (HLO)."""

import math
import re
from collections import Counter
from functools import cache

KINDS = "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute"
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", re.MULTILINE)
COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\((.*)$", re.MULTILINE)
ARRAY = re.compile(r"(pred|[a-z]+\d+)(?:e\d+m\d+\w*)?\[([\d,]*)\]")
CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CONDITION = re.compile(r" while\(.*condition=%?([\w.\-]+)")
BOUND = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
"""The only number in the condition of a loop that counts steps from 0. On TPUs, nothing else says how often it runs."""
STARTED, IN_PARTS = "AsyncCollectiveStart", "chain_id="
"""On TPUs, a collective that runs beside other work is written once in each of several fusions. The first starts it."""
SCATTERED = "all-reduce-scatter"
"""Name of a fusion of TPUs that adds up arrays, of which each device gets a part."""
GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\]|mesh\[([^\]]*)\] \{([^}]*)\})")
"""Ranks that exchange data: the first group, sizes of groups, or axes of a mesh."""
AXIS = re.compile(r"'(\w+)'=(\d+)")


def received_bytes(program: str) -> Counter[str]:
    """Bytes that a device receives in a call, by kind of collective.

    Loops with a known number of steps count as often as they run, others once. Of several branches, all count.
    """
    texts: dict[str, str] = {}
    entry, starts = "", [*COMPUTATION.finditer(program)]
    ends = [*(start.start() for start in starts[1:]), len(program)]
    for start, end in zip(starts, ends, strict=True):
        texts[start[2]] = program[start.end() : end]
        entry = start[2] if start[1] else entry

    @cache
    def total(name: str) -> Counter[str]:
        text = texts.get(name, "")
        found = _exchanged(text, scattered=name.startswith(SCATTERED))
        for called, times in _calls(text, texts):
            for kind, nbytes in total(called).items():
                found[kind] += times * nbytes
        return found

    return total(entry)


def _exchanged(text: str, scattered: bool) -> Counter[str]:
    """Bytes that the collectives of one computation receive. With `scattered`, a device needs its part of sums only."""
    found: Counter[str] = Counter()
    for results, kind, started, rest in COLLECTIVE.findall(text):
        if IN_PARTS in rest and STARTED not in text:
            continue
        arrays = [_nbytes(*array) for array in ARRAY.findall(results)]
        if started and kind != "all-reduce":  # operands, then results, and perhaps two numbers of a context
            arrays = arrays[len(arrays) // 2 :] if kind != "collective-permute" else arrays[1:2]
        size, ranks = sum(arrays), _ranks(rest)
        if scattered and kind == "all-reduce":
            kind, size = "reduce-scatter", size / ranks
        others = {"all-reduce": 2 * (ranks - 1) / ranks, "reduce-scatter": ranks - 1, "collective-permute": 1}
        found[kind] += round(size * others.get(kind, (ranks - 1) / ranks))
    return found


def _ranks(attributes: str) -> int:
    """Number of devices that exchange data in a collective. 1 if it is unknown."""
    found = GROUPS.search(attributes)
    if found is None:
        return 1
    listed, size, axes, used = found.groups()
    if axes is not None:
        return math.prod(int(size) for name, size in AXIS.findall(axes) if f"'{name}'" in used)
    return int(size or listed.count(",") + 1)


def _calls(text: str, texts: dict[str, str]) -> list[tuple[str, int]]:
    """Names of the computations that one computation calls, with the number of times."""
    found = []
    for line in text.splitlines():
        trips = TRIPS.search(line)
        if trips is None and (condition := CONDITION.search(line)):
            bounds = [*BOUND.finditer(texts.get(condition[1], ""))]
            trips = bounds[0] if len(bounds) == 1 else None
        names = CALLED.findall(line)
        for branches in BRANCHES.findall(line):
            names += re.findall(r"%?([\w.\-]+)", branches)
        found += [(name, int(trips[1]) if trips else 1) for name in names]
    return found


def _nbytes(kind: str, shape: str) -> int:
    width = 8 if kind == "pred" else int(re.sub(r"\D", "", kind))
    return width * math.prod(map(int, filter(None, shape.split(",")))) // 8
