"""`skyrl runs list|show|plot|rollouts|compare`: tables and plots of runs on disk."""

import argparse
import heapq
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from skyrl.errors import ConfigError
from skyrl.train.rollouts.records import as_text, from_state
from skyrl.train.runs.folder import RunFolder, find_runs
from skyrl.train.tracking.plots import plot_lines
from skyrl.utils.arguments import ArgumentParser
from skyrl.utils.console import say, say_error
from skyrl.utils.spelling import did_you_mean
from skyrl.utils.subcommands import Command, output_may_be_cut, run_subcommand

SHOWN = ("reward/avg_raw_reward", "eval/all/avg_score", "policy/entropy", "policy/approx_kl", "policy/loss")
"""Metrics that `compare` and `plot` show by default, if the runs have them."""

MINOR = ("async/", "generate/", "step", "throughput/", "timing/")
"""Prefixes of metrics that `show` leaves out."""


def list_runs(argv: Sequence[str]) -> int:
    """list the runs below a folder"""
    parser = _parser("list", list_runs)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("."), help="default: the working directory")
    given = parser.parse_args(argv)

    def lines() -> Iterator[str]:
        if not given.folder.is_dir():
            raise ConfigError(f"{given.folder} is no folder; name one with runs below it")
        rows = [["algorithm", "step", "checkpoint", "written", "reward", "eval", "run"]]
        for run in find_runs(given.folder):
            last = run.last
            newest = str(run.checkpoints[-1]) if run.checkpoints else "-"
            losses = (value for name, value in last.items() if name.startswith("eval/") and name.endswith("/loss"))
            score = last.get("eval/all/avg_score", next(losses, None))  # for SFT, the loss on the first data set
            numbers = [_number(last.get("reward/avg_raw_reward")), _number(score)]
            where = str(run.path.relative_to(given.folder))
            rows.append([run.algorithm, str(run.step), newest, _ago(run.seconds), *numbers, where])
        yield from _table(rows, left=(0, 6)) if len(rows) > 1 else [f"no runs below {given.folder}"]

    return _told("list", lines)


def show(argv: Sequence[str]) -> int:
    """show a run: settings that differ from the defaults, last metrics, checkpoints"""
    parser = _parser("show", show)
    parser.add_argument("run", help="its ckpt_path, which may be a URL")
    parser.add_argument("--all", action="store_true", help="metrics of time and sizes too")
    given = parser.parse_args(argv)

    def lines() -> Iterator[str]:
        run = RunFolder.at(given.run)
        yield f"{run.title}: {run.algorithm}, {run.step} steps, written {_ago(run.seconds)}"
        kept = ", ".join(map(str, run.checkpoints)) or "none; so its settings are not known"
        yield f"checkpoints of steps: {kept}"
        if different := run.differences():
            yield "\nsettings that are not the defaults"
            yield from (f"  {name}={json.dumps(value)}" for name, value in different.items())
        yield "\nlast metrics"
        last = {name: value for name, value in run.last.items() if given.all or not name.startswith(MINOR)}
        yield from (f"  {line}" for line in _table([[name, _number(last[name])] for name in sorted(last)]))

    return _told("show", lines)


def rollouts(argv: Sequence[str]) -> int:
    """print samples of a run with their rewards"""
    parser = _parser("rollouts", rollouts)
    parser.add_argument("run", help="its ckpt_path; it has to have run with trainer.dump_data_batch=true")
    parser.add_argument("--step", type=int, help="default: the last one")
    parser.add_argument("--count", type=int, default=4, metavar="N", help="samples to print (default: 4)")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_true", help="those with the highest rewards")
    order.add_argument("--worst", action="store_true", help="those with the lowest rewards")
    given = parser.parse_args(argv)

    def lines() -> Iterator[str]:
        files = RunFolder.at(given.run).rollouts()
        step = max(files) if given.step is None else given.step
        if step not in files:
            raise ConfigError(f"--step={step}: there are rollouts of the steps {', '.join(map(str, files))}")
        records = [json.loads(line) for line in files[step].read_text().splitlines()]
        mean = sum(record["reward"] for record in records) / max(len(records), 1)
        yield f"step {step}: {len(records)} samples, mean reward {mean:.4g}\n"
        chosen = records[: given.count]
        if given.best or given.worst:
            pick = heapq.nlargest if given.best else heapq.nsmallest
            chosen = pick(given.count, records, key=lambda record: record["reward"])
        yield from (as_text(from_state(record)) for record in chosen)

    return _told("rollouts", lines)


def compare(argv: Sequence[str]) -> int:
    """compare metrics of runs at the same steps"""
    parser = _parser("compare", compare)
    parser.add_argument("runs", nargs="+", metavar="run", help="ckpt_path of each, which may be a URL")
    parser.add_argument("--metric", action="append", metavar="NAME", help="may be given several times")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="steps of each table at most (default: 8)")
    given = parser.parse_args(argv)

    def lines() -> Iterator[str]:
        runs = [RunFolder.at(path) for path in given.runs]
        names = _metrics_of(runs, given.metric)
        for number, path in enumerate(given.runs, start=1):
            yield f"[{number}] {path}"
        for name in names:
            values = [{row["step"]: row.get(name) for row in run.metrics if name in row} for run in runs]
            steps = sorted({step for of_run in values for step in of_run})
            head = ["step", *(f"[{number}]" for number in range(1, len(runs) + 1))]
            table = [[str(step), *(_number(one.get(step)) for one in values)] for step in _spread(steps, given.rows)]
            yield f"\n{name}"
            yield from (f"  {line}" for line in _table([head, *table]))

    return _told("compare", lines)


def plot(argv: Sequence[str]) -> int:
    """plot metrics of runs over steps, one PNG per metric"""
    parser = _parser("plot", plot)
    parser.add_argument("runs", nargs="+", metavar="run", help="ckpt_path of each, which may be a URL")
    parser.add_argument("--metric", action="append", metavar="NAME", help="may be given several times")
    parser.add_argument(
        "--output", type=Path, default=Path("."), metavar="FOLDER", help="default: the working directory"
    )
    given = parser.parse_args(argv)

    def lines() -> Iterator[str]:
        runs = {path: RunFolder.at(path) for path in given.runs}
        for name in _metrics_of([*runs.values()], given.metric):
            points = {
                path: [(row["step"], row[name]) for row in run.metrics if row.get(name) is not None]
                for path, run in runs.items()
            }
            path = given.output / f"{name.replace('/', '-')}.png"
            if not plot_lines(points, path, title=name):
                raise ConfigError("matplotlib is not installed; pip install 'skyrl[train]'")
            yield str(path)

    return _told("plot", lines)


def _metrics_of(runs: Sequence[RunFolder], wanted: Sequence[str] | None) -> list[str]:
    """Return the requested metrics, or by default the metrics in `SHOWN` that a run has.

    Raises ConfigError for a requested metric that no run has.
    """
    known = {name for run in runs for row in run.metrics for name in row} - {"step"}
    if missing := sorted({*(wanted or ())} - known):
        near = did_you_mean(missing[0], known)
        raise ConfigError(f"--metric={missing[0]}: no run has it; there are {', '.join(sorted(known))}{near}")
    return list(wanted or [name for name in SHOWN if name in known])


COMMANDS: dict[str, Command] = {
    "list": list_runs,
    "show": show,
    "plot": plot,
    "rollouts": rollouts,
    "compare": compare,
}


def main(argv: Sequence[str]) -> int:
    """Run the command that `argv` names. Returns the exit status."""
    return run_subcommand(argv, COMMANDS, prog="skyrl runs", description="Look at runs on disk.", kind="command")


def _parser(name: str, command: Command) -> argparse.ArgumentParser:
    what = command.__doc__ or ""
    return ArgumentParser(prog=f"skyrl runs {name}", description=f"{what[:1].upper()}{what[1:]}.", allow_abbrev=False)


def _told(name: str, lines: Callable[[], Iterator[str]]) -> int:
    """Print the lines. A ConfigError is printed as one line. Returns the exit status."""
    try:
        with output_may_be_cut():
            for line in lines():
                say(line)
    except ConfigError as error:
        say_error(f"skyrl runs {name}: error: {error}")
        return 1
    return 0


def _table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Return the lines of a table. Columns whose indices are in `left` are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


def _ago(seconds: float) -> str:
    passed = max(time.time() - seconds, 0)
    for unit, size in {"d": 86400, "h": 3600, "min": 60}.items():
        if passed >= size:
            return f"{passed / size:.0f} {unit} ago"
    return f"{passed:.0f} s ago"


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """Return up to `count` of the steps, evenly spaced, including the first and the last."""
    if len(steps) <= count:
        return [*steps]
    places = max(count - 1, 1)
    return sorted({steps[round(place * (len(steps) - 1) / places)] for place in range(places + 1)})
