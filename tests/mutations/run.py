"""Puts known defects back, one at a time, and shows that a named test turns red for each.

Run: `python tests/mutations/run.py [id ...]`; with `--check` nothing is run, and only the texts are looked for. Each
defect of `defects.py` and of the files beside it is applied to a copy of the project, and only its tests run there. A
defect fails the script if its text is not found exactly once, if one of its tests stays green, or if a test breaks
before it could judge (an error while importing or in a fixture proves nothing). The same tests must be green on the
unchanged copy first.
"""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from algorithm_defects import ALGORITHM_DEFECTS
from answer_defects import ANSWER_DEFECTS
from bucket_defects import BUCKET_DEFECTS
from config_defects import CONFIG_DEFECTS
from contract_defects import CONTRACT_DEFECTS
from defects import DEFECTS, Defect
from engine_defects import ENGINE_DEFECTS
from env_defects import ENV_DEFECTS
from fair_defects import FAIR_DEFECTS
from family_defects import FAMILY_DEFECTS
from log_defects import LOG_DEFECTS
from remote_defects import REMOTE_DEFECTS
from retention_defects import RETENTION_DEFECTS
from rollout_defects import ROLLOUT_DEFECTS
from run_defects import RUN_DEFECTS
from sandbox_defects import SANDBOX_DEFECTS
from sft_defects import SFT_DEFECTS
from sharing_defects import SHARING_DEFECTS
from small_defects import SMALL_DEFECTS
from source_defects import SOURCE_DEFECTS
from torch_defects import TORCH_DEFECTS
from trouble_defects import TROUBLE_DEFECTS

KNOWN = (
    DEFECTS
    + (RETENTION_DEFECTS + SHARING_DEFECTS + ANSWER_DEFECTS + LOG_DEFECTS + TROUBLE_DEFECTS)
    + (REMOTE_DEFECTS + FAIR_DEFECTS + CONTRACT_DEFECTS + FAMILY_DEFECTS + BUCKET_DEFECTS),
    ALGORITHM_DEFECTS,
    CONFIG_DEFECTS,
    ROLLOUT_DEFECTS,
    ENV_DEFECTS + SANDBOX_DEFECTS,
    RUN_DEFECTS,
    SFT_DEFECTS,
    SOURCE_DEFECTS,
    SMALL_DEFECTS,
    TORCH_DEFECTS,
    ENGINE_DEFECTS,
)
ROOT = Path(__file__).parents[2]
PROGRAMS = "programs"
"""Folder for what the unchanged project has compiled: most of it is the same with a defect."""
COPIED = ("skyrl", "tests", "benchmarks", "docs", "pyproject.toml")

PROCESSES = multiprocessing.get_context("forkserver")
"""Starts processes in which the slowest libraries are imported already."""
PROCESSES.set_forkserver_preload(["torch", "transformers", "peft", "datasets"])
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # as tests/conftest.py, and read while they are imported


def copy_project(target: Path) -> Path:
    """The project's files, without caches."""
    target.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.db*"))
        else:
            shutil.copy(source, target / name)
    return target


def mismatch(defect: Defect, project: Path) -> str | None:
    """Reason why a defect cannot be put back: a text that its file does not hold exactly once."""
    for edit in defect.edits:
        if (found := (project / edit.file).read_text().count(edit.old)) != 1:
            return f"{edit.file}: the text to replace occurs {found} times, not once: {edit.old.strip()[:60]!r}"
    return None


def apply(defect: Defect, project: Path) -> str | None:
    """Edit the copy; the reason if it cannot be done."""
    if problem := mismatch(defect, project):
        return problem
    for edit in defect.edits:
        path = project / edit.file
        path.write_text(path.read_text().replace(edit.old, edit.new))
    return None


def check(defects: list[Defect]) -> int:
    """Look for the texts and tests of defects in the project as it is. Returns the exit status."""
    problems = [f"{defect.id}: {problem}" for defect in defects if (problem := mismatch(defect, ROOT))]
    for defect in defects:
        for test in defect.tests:
            path, name = test.split("[")[0].split("::")
            if f"def {name}(" not in (ROOT / path).read_text():
                problems.append(f"{defect.id}: {path} has no test {name}")
    print(*problems, f"{len(defects)} defects, {len(problems)} of them out of date", sep="\n")
    return 1 if problems else 0


def outcomes(project: Path, tests: list[str], programs: Path) -> dict[str, str]:
    """ "red", "green" or "broken" for each test (all its parameters together), as run in `project`.

    Compiled programs are kept in the folder `programs`, which one process at a time may use.
    """
    report, output = project / "report.xml", project / "output.txt"
    options = [
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore:Module already imported",
        "-m",
        "",
        f"--junitxml={report}",
        *tests,
    ]
    variables = {
        "PYTHONPATH": str(project),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(programs),
    }
    process = PROCESSES.Process(target=_run_pytest, args=[project, options, variables, output])
    process.start()
    process.join()
    found: dict[str, set[str]] = {test: set() for test in tests}
    cases = ET.parse(report).iter("testcase") if report.exists() else []
    for case in cases:
        path = case.get("classname", "").replace(".", "/") + ".py"
        name = case.get("name", "")
        for test in tests:
            if test == f"{path}::{name}" or ("[" not in test and test == f"{path}::{name.split('[')[0]}"):
                kinds = {child.tag for child in case}
                found[test].add("broken" if "error" in kinds else "red" if "failure" in kinds else "green")
    results = {test: _verdict(kinds) for test, kinds in found.items()}
    if "broken" in results.values():
        print(output.read_text()[-3000:], file=sys.stderr)
    return results


def _run_pytest(project: Path, options: list[str], variables: dict[str, str], output: Path) -> None:
    """Run pytest on a copy of the project, in a process of its own."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= variables
    os.chdir(project)
    sys.path[0] = str(project)  # instead of the folder of this script
    sys.modules["__main__"] = ModuleType("__main__")  # spawned children of tests would import this script
    sys.exit(pytest.main(options))


def _verdict(kinds: set[str]) -> str:
    """One red case is a red test; no case at all, or only errors, is a broken one."""
    if "red" in kinds:
        return "red"
    return "green" if kinds == {"green"} else "broken"


def judge(defect: Defect, scratch: Path) -> tuple[Defect, str, float]:
    """(defect, what is wrong or "", seconds)."""
    start = time.monotonic()
    project = copy_project(scratch / defect.id)
    problem = apply(defect, project)
    programs = scratch / f"programs-{threading.get_ident()}"
    if not programs.exists():
        shutil.copytree(scratch / PROGRAMS, programs)
    if problem is None:
        results = outcomes(project, defect.tests, programs)
        problem = "; ".join(f"{test} is {result}" for test, result in results.items() if result != "red")
    shutil.rmtree(project)
    return defect, problem, time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", help="only these defects")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--check", action="store_true", help="look for texts and tests only; seconds")
    arguments = parser.parse_args()
    known = [defect for defects in KNOWN for defect in defects]
    if unknown := set(arguments.ids) - {defect.id for defect in known}:
        parser.error(f"no defects {', '.join(sorted(unknown))}; known are {', '.join(defect.id for defect in known)}")
    chosen = [defect for defect in known if not arguments.ids or defect.id in arguments.ids]
    if arguments.check:
        return check(chosen)
    with tempfile.TemporaryDirectory(prefix="skyrl-mutations-") as scratch:
        project = copy_project(Path(scratch) / "unchanged")
        tests = sorted({test for defect in chosen for test in defect.tests})
        (programs := Path(scratch) / PROGRAMS).mkdir()
        wrong = {test: result for test, result in outcomes(project, tests, programs).items() if result != "green"}
        if wrong:
            print("Not green on the unchanged project:", *wrong.items(), sep="\n  ")
            return 1
        failures = 0
        with ThreadPoolExecutor(arguments.jobs) as threads:
            for defect, problem, seconds in threads.map(lambda defect: judge(defect, Path(scratch)), chosen):
                failures += bool(problem)
                print(f"{defect.id:<7} {'FAIL' if problem else 'red':<5} {seconds:4.0f} s  {defect.what}", flush=True)
                for line in [problem] if problem else defect.tests:
                    print(f"        {line}")
    print(f"{len(chosen) - failures} of {len(chosen)} defects turn their tests red")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
