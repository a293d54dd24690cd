"""Results: a JSON line per case, on disk before the next case begins, and Markdown tables of such lines.

A file may have several lines for a case; the last one counts. Other text is skipped, so that a file with a truncated
last line, or the whole output of the command, can be read as well.
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
"""Figures that are shown above and below the tables instead."""
LONGEST_CELL = 60
"""Maximum characters of a cell. Longer lists of texts are below the table, longer texts only in the lines."""


def read(path: Path) -> list[Line]:
    """Results in a file. Raises OSError."""
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and {"case", "group", "status"} <= line.keys():
                lines.append(line)
    return lines


def latest(lines: Iterable[Line]) -> dict[str, Line]:
    """Last line of each case, by name, in the order of first lines."""
    return {line["case"]: line for line in lines}


def open_for_more(path: Path) -> TextIO:
    """Open a file of results for appending, and create it if missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")
    if file.tell():
        file.seek(file.tell() - 1)
        if file.read() != "\n":  # the machine crashed in the middle of a line
            file.write("\n")
    return file


def append(file: TextIO, line: Line) -> None:
    """Write a line durably, so that it survives a crash of the machine."""
    file.write(json.dumps(line) + "\n")
    file.flush()
    os.fsync(file.fileno())


def tables(lines: Iterable[Line]) -> str:
    """A table per group, with errors below it."""
    groups: dict[str, list[Line]] = {}
    for line in latest(lines).values():
        groups.setdefault(line["group"], []).append(line)
    return "\n\n".join(_table_of_group(group, rows) for group, rows in groups.items())


def _table_of_group(group: str, lines: Sequence[Line]) -> str:
    """Format a group. Cases with the same figures share a table."""
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
    """Figures as texts of cells. Names of nested figures are joined."""
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
    """Format a value for people: numbers with three or four digits."""
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
    """A Markdown table with a heading."""
    body = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in body)


def plan_table(planned: Sequence[Planned]) -> str:
    """Table of cases with their expected seconds; `sum_s` is cumulative over cases that will run."""
    rows, total = [], 0.0
    for case, fits, note, seconds in planned:
        total += seconds if fits else 0.0
        rows.append([case.name, case.group, number(seconds), number(total) if fits else "", note])
    return markdown(["case", "group", "estimate_s", "sum_s", "note"], rows)
