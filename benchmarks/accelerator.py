"""Correctness and speed on this machine's accelerator.

Run: `python benchmarks/accelerator.py` on a machine with one GPU or TPU. It needs no network and ends within
`--minutes`; `--tiny` runs small versions of all cases on a CPU. Cases run in order of importance, as many as fit into
the time, and `--plan` lists them. Each group of cases has a separate process, so a crash costs one case. Prints one
JSON line per case, which is on disk before the next case begins, and finally a table. `--resume FILE` continues an
earlier run: with cases that were not run or cut short, then with failed ones. Ctrl-C and SIGTERM end the run cleanly.
Exit status: 0, 1 if a case failed, 2 for invalid options, 130 if interrupted.
"""

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from on_device import report
from on_device.case import Case
from on_device.process import CUT_SHORT, OK, Outcome
from on_device.runner import choose, execute, in_order, plan
from skyrl.errors import ConfigError

FOLDER = Path(__file__).parent
INTERRUPTED = 130
"""Exit status after an interrupt, as in shells."""


def commit() -> str | None:
    """Short hash of the checked-out commit; None outside of a checkout."""
    try:
        told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=FOLDER, capture_output=True, text=True)
    except OSError:  # git is not installed
        return None
    return told.stdout.strip() or None


class Run:
    """Output of one call: lines for a file and standard output, written as cases end."""

    def __init__(self, path: Path, earlier: list[report.Line], tiny: bool):
        self.file = report.open_for_more(path)
        self.tiny = tiny
        self.commit = commit()
        self.device: object = None
        self.failed = False
        self.ended: set[str] = set()
        """Names of cases that need no further run, including failed ones."""
        for line in earlier:
            report.append(self.file, line)

    def tell(self, case: Case, outcome: Outcome) -> None:
        """Write the line of a case."""
        self.device = (outcome.result or {}).get("device", self.device)
        if outcome.status != CUT_SHORT:
            self.ended.add(case.name)
            self.failed |= outcome.status != OK
        line: report.Line = {
            "case": case.name,
            "group": case.group,
            "status": outcome.status,
            "seconds": round(outcome.seconds, 2),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": self.commit,
            "device": self.device,
            "estimate_s": case.estimate_s,
            "tiny": self.tiny,
        }
        more = {"error": outcome.error, "output": outcome.output, "result": outcome.result}
        line |= {name: value for name, value in more.items() if value is not None}
        report.append(self.file, line)
        print(json.dumps(line), flush=True)


def interrupt(number: int, frame: object) -> None:
    """Handle a signal: the first one ends the run cleanly, later ones are ignored."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def lines_of(path: Path, option: str) -> list[report.Line]:
    """Results in a file given by the user."""
    try:
        lines = report.read(path)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}; name a file that an earlier call has written") from error
    if not lines:
        raise ConfigError(f"{option} {path}: it holds no results; name a file that an earlier call has written")
    return lines


def run(options: argparse.Namespace, known: Sequence[Case], deadline: float) -> int:
    """Plan and run cases. Returns the exit status; raises ConfigError for what the user can fix."""
    assert len({case.name for case in known}) == len(known), "two cases have the same name"
    cases = choose(known, options.only)
    earlier = lines_of(options.resume, "--resume") if options.resume else []
    if any(line.get("tiny", options.tiny) != options.tiny for line in earlier):
        way_out = "leave --tiny out" if options.tiny else "add --tiny"
        raise ConfigError(f"--resume {options.resume}: its cases are of another size; {way_out} or name another file")
    statuses = {name: line["status"] for name, line in report.latest(earlier).items()}
    planned = report.plan_table(plan(cases, statuses, deadline - time.monotonic()))
    if options.plan:
        print(planned)
        return 0
    path = options.output or options.resume or FOLDER / "results" / f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}.jsonl"
    same_file = path.exists() and options.resume is not None and path.samefile(options.resume)
    try:
        told = Run(path, [] if same_file else earlier, options.tiny)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file as --output") from error
    print(f"results: {path}\n\n{planned}\n", flush=True)
    queue = in_order(cases, statuses)
    interrupted = False
    with told.file:
        try:
            execute(queue, deadline, told.tell)
        except KeyboardInterrupt:
            interrupted = True
    print(f"\n{report.tables(report.read(path))}")
    if left := [case for case in queue if case.name not in told.ended]:
        print(
            f"\nnot run: {'; '.join(case.name for case in left)}\ngo on with: {command_to_go_on(options, path, left)}"
        )
    return INTERRUPTED if interrupted else int(told.failed)


def command_to_go_on(options: argparse.Namespace, path: Path, left: Sequence[Case]) -> str:
    """Command line that runs the remaining cases, with enough time for each of them."""
    minutes = max(options.minutes, *(math.ceil((case.estimate_s + case.start_s) / 60 + 0.1) for case in left))
    words = ["python", "benchmarks/accelerator.py", "--resume", str(path), "--minutes", f"{minutes:g}"]
    words += ["--tiny"] if options.tiny else []
    words += ["--only", *options.only] if options.only else []
    return shlex.join(words)


def main(arguments: list[str] | None = None, cases: Callable[[bool], list[Case]] | None = None) -> int:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="for all cases, 9 if not given")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts of names of cases, or groups")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="results of an earlier call, to go on with")
    parser.add_argument("--output", type=Path, metavar="FILE", help="for the lines; without it, FILE of --resume")
    parser.add_argument("--tiny", action="store_true", help="small versions of all cases, for a CPU")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print tables of saved lines, and end")
    parser.add_argument("--plan", action="store_true", help="print what would be run, and end")
    options = parser.parse_args(arguments)
    if not 0 < options.minutes < math.inf:
        parser.error(f"--minutes {options.minutes:g}: use a positive number")
    try:
        if options.table:
            print(report.tables(lines_of(options.table, "--table")))
            return 0
        if cases is None:
            from on_device.cases import cases
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        return run(options, cases(options.tiny), begun + 60 * options.minutes)
    except ConfigError as error:
        parser.error(str(error))
    except KeyboardInterrupt:  # before the first case
        return INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, so buffered output cannot be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
