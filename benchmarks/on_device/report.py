"""Results: a JSON line per case, on disk before the next case begins, and Markdown tables of such lines.

A file may hold several lines of a case; the last one counts. Text that is no result is passed over, so that a file
whose last line was cut off, or all that the command has printed, can be read as well.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from .process import OK
from .runner import Planned

Line = dict[str, Any]

LEFT_OUT = ("device", "problems")
"""Figures that are told elsewhere: above and below the tables."""
LONGEST_CELL = 60
"""Characters. Longer lists of texts stand below the table, longer texts in the lines only."""


def read(path: Path) -> list[Line]:
    """Results of a file. Raises OSError."""
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and {"case", "group", "status"} <= line.keys():
                lines.append(line)
    return lines


def latest(lines: Iterable[Line]) -> dict[str, Line]:
    """The last line of each case, by its name, in the order of first lines."""
    return {line["case"]: line for line in lines}


def open_for_more(path: Path) -> TextIO:
    """Open a file of results, made if missing, to append to it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")
    if file.tell():
        file.seek(file.tell() - 1)
        if file.read() != "\n":  # the machine has died in the middle of a line
            file.write("\n")
    return file


def append(file: TextIO, line: Line) -> None:
    """Write a line so that it outlives a machine that dies right after."""
    file.write(json.dumps(line) + "\n")
    file.flush()
    os.fsync(file.fileno())


def tables(lines: Iterable[Line]) -> str:
    """A table per group, and what went wrong below it."""
    groups: dict[str, list[Line]] = {}
    for line in latest(lines).values():
        groups.setdefault(line["group"], []).append(line)
    return "\n\n".join(_table_of_group(group, rows) for group, rows in groups.items())


def _table_of_group(group: str, lines: Sequence[Line]) -> str:
    """Cases with the same figures share a table."""
    devices = list(dict.fromkeys(line["device"] for line in lines if line.get("device")))
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for line in lines:
        row = {"case": line["case"], "status": line["status"], "seconds": number(line.get("seconds", ""))}
        row |= {"device": line.get("device") or ""} if len(devices) > 1 else {}
        row |= _cells(line.get("result") or {}) | row
        alike.setdefault(tuple(row), []).append(list(row.values()))
    parts = [f"### {group}" + (f" ({devices[0]})" if len(devices) == 1 else "")]
    parts += [markdown(columns, rows) for columns, rows in alike.items()]
    below = [f"- {line['case']}: {'; '.join(_complaints(line))}" for line in lines if line["status"] != OK]
    below += [text for line in lines for text in _lists(line)]
    return "\n\n".join([*parts, "\n".join(below)] if below else parts)


def _lists(line: Line) -> Iterator[str]:
    """Lists of texts that are too long for a cell."""
    for name, value in (line.get("result") or {}).items():
        if name in LEFT_OUT or not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            continue
        if len(", ".join(value)) > LONGEST_CELL:
            yield "\n".join([f"- {line['case']}, {name}:", *(f"  - {item}" for item in value)])


def _complaints(line: Line) -> list[str]:
    problems = (line.get("result") or {}).get("problems")
    return [str(problem) for problem in problems or [line.get("error") or line["status"]]]


def _cells(figures: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Figures as the texts of cells; those of a dict in a dict have the names of both."""
    cells: dict[str, str] = {}
    for name, value in figures.items():
        if not prefix and name in LEFT_OUT:
            continue
        if isinstance(value, dict):
            cells |= _cells(value, f"{prefix}{name} ")
            continue
        if isinstance(value, list):
            if any(isinstance(item, list | dict) for item in value):
                continue
            value = ", ".join(number(item) for item in value)
        text = " ".join(number(value).split())
        if len(text) <= LONGEST_CELL:
            cells[prefix + name] = text
    return cells


def number(value: object) -> str:
    """A value to be read by people: three or four digits of a number."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, int):
        return str(value) if abs(value) < 10_000 else f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e3:
        return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"
    return number(round(value)) if 1e3 <= abs(value) < 1e7 else f"{value:.2e}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a heading."""
    body = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in body)


def plan_table(planned: Sequence[Planned]) -> str:
    """Cases with the seconds that they are expected to take; `sum_s` is of all that run, up to each."""
    rows, total = [], 0.0
    for case, fits, note, seconds in planned:
        total += seconds if fits else 0.0
        rows.append([case.name, case.group, number(seconds), number(total) if fits else "", note])
    return markdown(["case", "group", "estimate_s", "sum_s", "note"], rows)
