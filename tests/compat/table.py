"""The table of docs/compatibility.md, made from a run of the matrix.

Run: `python -m tests.compat.table build/matrix.json` prints it; with `--write` it replaces the one in the page.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from tests.compat.conformance import Checks

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
START, END = "<!-- made by tests/compat/table.py: start -->", "<!-- end -->"
MARKS = {"ok": "ok", "failed": "**failed**", "absent": "-"}
OWN = {"run": "The script runs to its end.", "values": "All numbers are those that the newest SDK gets."}
"""What the runner checks, beside the script."""


def as_markdown(summary: dict[str, Any]) -> str:
    """A row for each check, a column for each SDK."""
    sdks = summary["sdks"]
    names = list(dict.fromkeys(name for result in sdks.values() for name in result["checks"]))
    lines = [
        f"Run of {summary['date']}, Python {summary['python']}. `-`: this SDK has no such thing.",
        "",
        f"| check | {' | '.join(sdks)} |",
        f"| --- |{' --- |' * len(sdks)}",
    ]
    for name in names:
        marks = [MARKS[result["checks"].get(name, {"status": "absent"})["status"]] for result in sdks.values()]
        lines.append(f"| {name} | {' | '.join(marks)} |")
    return "\n".join(lines)


def legend(summary: dict[str, Any]) -> str:
    """What each check is about: the first line of its docstring."""
    names = dict.fromkeys(name for result in summary["sdks"].values() for name in result["checks"])
    texts = {name: OWN.get(name) or (getattr(Checks, name).__doc__ or "").split("\n")[0] for name in names}
    return "\n".join(f"- `{name}`: {text}" for name, text in texts.items())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("summary", type=Path)
    parser.add_argument("--write", action="store_true", help=f"replace the table in {PAGE.name}")
    arguments = parser.parse_args()
    summary = json.loads(arguments.summary.read_text())
    text = f"{as_markdown(summary)}\n\n{legend(summary)}"
    if not arguments.write:
        print(text)
        return
    page = PAGE.read_text(encoding="utf-8")
    block = re.compile(f"{re.escape(START)}.*?{re.escape(END)}", re.DOTALL)
    assert len(block.findall(page)) == 1, f"{PAGE} needs one block between {START!r} and {END!r}"
    PAGE.write_text(block.sub(lambda _: f"{START}\n{text}\n{END}", page), encoding="utf-8")


if __name__ == "__main__":
    main()
