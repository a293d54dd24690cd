"""The tables of docs/compatibility.md, made from runs of the matrix and of the cookbook's recipes.

Run: `python -m tests.compat.table` prints those of build/matrix.json and build/cookbook.json; with `--write` they
replace the ones in the page.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tests.compat.conformance import Checks

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
RUNS = (Path("build/matrix.json"), Path("build/cookbook.json"))
MARKS = {"ok": "ok", "failed": "**failed**", "absent": "-"}
OWN = {"run": "The script runs to its end.", "values": "All numbers equal those of the newest SDK."}
"""Checks of the runner, beside those of the script."""


def as_markdown(summary: dict[str, Any]) -> str:
    """The matrix: a row for each check, a column for each SDK."""
    sdks = summary["sdks"]
    names = list(dict.fromkeys(name for result in sdks.values() for name in result["checks"]))
    lines = [
        f"Run of {summary['date']}, Python {summary['python']}. `-`: the SDK does not have this feature.",
        "",
        f"| check | {' | '.join(sdks)} |",
        f"| --- |{' --- |' * len(sdks)}",
    ]
    for name in names:
        marks = [MARKS[result["checks"].get(name, {"status": "absent"})["status"]] for result in sdks.values()]
        lines.append(f"| {name} | {' | '.join(marks)} |")
    return "\n".join(lines)


def legend(summary: dict[str, Any]) -> str:
    """Describe each check by the first line of its docstring."""
    names = dict.fromkeys(name for result in summary["sdks"].values() for name in result["checks"])
    texts = {name: OWN.get(name) or (getattr(Checks, name).__doc__ or "").split("\n")[0] for name in names}
    return "\n".join(f"- `{name}`: {text}" for name, text in texts.items())


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
        if "sdks" in summary:
            text = f"{as_markdown(summary)}\n\n{legend(summary)}\n"
        else:
            text = f"{recipes_as_markdown(summary)}\n"
        before, _, after = block(page, path.name)
        page = before + text + after
        if not arguments.write:
            print(text)
    if arguments.write:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
