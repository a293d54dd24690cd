"""Converts the JSON lines of the benchmarks to the tables of README.md: `make bench | python benchmarks/table.py`."""

import json
import sys
from collections.abc import Iterable

LEFT_OUT = ("benchmark", "machine", "repeats", "rounds", "steps")


def tables(lines: Iterable[str]) -> str:
    """A Markdown table per benchmark. Lines that are not JSON objects are skipped."""
    groups: dict[str, list[dict[str, object]]] = {}
    for line in lines:
        if line.startswith("{"):
            row = json.loads(line)
            groups.setdefault(f"{row['benchmark']} ({row['machine']})", []).append(row)
    parts = []
    for title, rows in groups.items():
        columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in LEFT_OUT]
        body = [columns, ["---"] * len(columns), *([str(row.get(name, "")) for name in columns] for row in rows)]
        parts.append("\n".join([f"### {title}", "", *("| " + " | ".join(cells) + " |" for cells in body)]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(tables(sys.stdin))
