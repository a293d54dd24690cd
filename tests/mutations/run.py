"""Reintroduce known defects, one at a time, and check that the test that each of them names fails.

Run: `python tests/mutations/run.py [NAME ...]`. `--check` runs no test, and only looks for the texts and tests. Each
defect of `defects.py` is applied to a copy of the project, in which its test runs. The script fails if a text is not
found exactly once, if a test passes, or if a test ends in an error before it could fail (such as an import error).
First, the same tests must pass in an unchanged copy.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from defects import DEFECTS, Defect

ROOT = Path(__file__).parents[2]
COPIED = ("skyrl", "tests", "benchmarks", "docs")


def mismatch(defect: Defect, project: Path) -> str | None:
    """Return the reason why a defect cannot be applied: its file does not contain the text exactly once."""
    found = (project / defect.file).read_text().count(defect.old)
    return None if found == 1 else f"{defect.file}: the text to replace occurs {found} times: {defect.old.strip()!r}"


def check(defects: Sequence[Defect]) -> int:
    """Look for the texts and tests of defects in the project as it is. Returns the exit status."""
    problems = [f"{defect.name}: {problem}" for defect in defects if (problem := mismatch(defect, ROOT))]
    for defect in defects:
        path, name = defect.test.split("[")[0].split("::")
        if f"def {name}(" not in (ROOT / path).read_text():
            problems.append(f"{defect.name}: {path} has no test {name}")
    print(*problems, f"{len(defects)} defects, {len(problems)} problems", sep="\n")
    return 1 if problems else 0


def failures(project: Path, tests: Sequence[str]) -> tuple[int, str]:
    """(failed tests, output) of tests in a copy of the project. -1: none failed or passed, or one ended in an error."""
    report = project / "report.xml"
    command = [sys.executable, "-m", "pytest", "-m", "", "-W", "ignore:Module already imported"]
    variables = {"PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, f"--junitxml={report}", *tests],
        cwd=project,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    suite = ET.parse(report).find("testsuite") if report.exists() else None
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "skipped", "errors", "failures")} if suite else {}
    if not counts or counts["errors"] or counts["tests"] == counts["skipped"]:
        return -1, done.stdout
    return counts["failures"], done.stdout


def judge(defect: Defect, unchanged: Path) -> str:
    """Return the reason why a defect is not detected, or an empty string."""
    project = unchanged.with_name(defect.name)
    shutil.copytree(unchanged, project)  # with the compiled programs, most of which are the same
    if problem := mismatch(defect, project):
        return problem
    path = project / defect.file
    path.write_text(path.read_text().replace(defect.old, defect.new))
    failed, output = failures(project, [defect.test])
    shutil.rmtree(project)
    return "" if failed > 0 else f"{defect.test} {'passes' if failed == 0 else 'is broken'}\n{output[-3000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these defects")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--check", action="store_true", help="look for texts and tests only; seconds")
    arguments = parser.parse_args()
    by_name = {defect.name: defect for defect in DEFECTS}
    if unknown := set(arguments.names) - by_name.keys():
        parser.error(f"unknown defects: {', '.join(sorted(unknown))}; known are {', '.join(by_name)}")
    chosen = [by_name[name] for name in arguments.names or by_name]
    if arguments.check:
        return check(chosen)
    with tempfile.TemporaryDirectory(prefix="skyrl-mutations-") as scratch:
        unchanged = Path(scratch) / "unchanged"
        for name in COPIED:
            shutil.copytree(ROOT / name, unchanged / name, ignore=shutil.ignore_patterns("__pycache__", "*.db*"))
        shutil.copy(ROOT / "pyproject.toml", unchanged)
        failed, output = failures(unchanged, sorted({defect.test for defect in chosen}))
        if failed:
            print("Not all tests pass in the unchanged project:", output, sep="\n")
            return 1
        start, problems = time.monotonic(), 0
        with ThreadPoolExecutor(arguments.jobs) as threads:
            for defect, problem in zip(chosen, threads.map(lambda one: judge(one, unchanged), chosen), strict=True):
                problems += bool(problem)
                print(f"{defect.name:<28} {problem or 'detected'}", flush=True)
    print(f"{len(chosen) - problems} of {len(chosen)} defects are detected, {time.monotonic() - start:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
