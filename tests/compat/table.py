"""The tables of docs/compatibility.md, made from runs of the matrix and of the cookbook's recipes.

Run: `python -m tests.compat.table` prints those of build/matrix.json and build/cookbook.json; with `--write` they
replace the ones in the page.
"""

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.compat.conformance import Checks

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
RUNS = (Path("build/matrix.json"), Path("build/cookbook.json"))
MARKS = {"ok": "ok", "failed": "**failed**", "absent": "-"}
OWN = {"run": "The script runs to its end.", "values": "All numbers equal those of the newest SDK."}
"""Checks of the runner, beside those of the script."""


def as_markdown(summary: dict[str, Any]) -> str:
    """The matrix: a row for each check, with the first line of its docstring and the SDKs that pass it."""
    sdks = summary["sdks"]
    lines = [
        f"Run of {summary['date']}, Python {summary['python']}, with SDK {', '.join(sdks)}.",
        "",
        "| check | meaning | SDKs |",
        "| --- | --- | --- |",
    ]
    for name in dict.fromkeys(name for result in sdks.values() for name in result["checks"]):
        text = OWN.get(name) or (getattr(Checks, name).__doc__ or "").split("\n")[0]
        statuses = {sdk: result["checks"].get(name, {"status": "absent"})["status"] for sdk, result in sdks.items()}
        lines.append(f"| `{name}` | {text} | {ranges(statuses)} |")
    return "\n".join(lines)


def ranges(statuses: dict[str, str]) -> str:
    """Return the SDKs that pass or fail a check, as ranges of versions; SDKs without its feature are left out."""
    if set(statuses.values()) == {"ok"}:
        return "all"
    parts = []
    for status, group in groupby(statuses, key=statuses.__getitem__):
        first, *others = group
        versions = " to ".join([first, *others[-1:]])
        if status != "absent":
            parts.append(versions if status == "ok" else f"{versions} {MARKS[status]}")
    return ", ".join(parts)


def recipes_as_markdown(summary: dict[str, Any]) -> str:
    """A row for each recipe of the cookbook."""
    lines = [
        f"Run of {summary['date']}, Python {summary['python']}, {summary['cores']} CPU cores, two recipes at a time.",
        "",
        "| recipe | metric | first steps | last steps | required change | steps | seconds | result |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in summary["recipes"].items():
        ends = [f"{found[end]:.3f}" if end in found else "" for end in ("first", "last")]
        wanted = [f"{found['by']:+}" if found["by"] else "none"]
        wanted += [f"`{other}` < {bound:g}" for other, bound in found["below"].items()]
        cells = [name, f"`{found['metric']}`", *ends, ", ".join(wanted), str(found.get("steps", ""))]
        lines.append(f"| {' | '.join(cells)} | {found['seconds']:.0f} | {MARKS[found['status']]} |")
    return "\n".join(lines)


def block(page: str, run: str) -> tuple[str, str, str]:
    """A page in three parts: the one between the marks of a run is in the middle."""
    before, start, rest = page.partition(f"<!-- made of build/{run}: start -->\n")
    inside, end, after = rest.partition("<!-- end -->")
    assert start and end, f"{PAGE} has no block for {run}"
    return before + start, inside, end + after


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path, nargs="*", default=RUNS)
    parser.add_argument("--write", action="store_true", help=f"replace the tables in {PAGE.name}")
    arguments = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    for path in arguments.run:
        summary = json.loads(path.read_text())
        text = f"{as_markdown(summary) if 'sdks' in summary else recipes_as_markdown(summary)}\n"
        before, _, after = block(page, path.name)
        page = before + text + after
        if not arguments.write:
            print(text)
    if arguments.write:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
