"""Runs recipes of tinker-cookbook, as they are, against a live server, and reads in their own metrics what they learnt.

Run: `python -m tests.cookbook.run [RECIPE ...]` in the project's folder; `make cookbook` does. Needs no network once
the environment is made. Writes `build/cookbook.json`, for the table in docs/compatibility.md. Exits with status 1 if a
recipe fails, if its loss does not fall or its reward does not rise, or if the server logged an error. That it can fail
is shown by `--option learning_rate=0`, with which every recipe must.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from skyrl.tinker.local_server import LocalServer
from tests.compat.environments import FOLDER, environment, variables
from tests.compat.run import errors_of
from tests.compat.table import recipes_as_markdown

MODEL = "Qwen/Qwen3-8B"
COOKBOOK = "tinker-cookbook==0.6.1"
DEPENDENCIES = (
    "aiohttp",
    "anyio",
    "blobfile",
    "chz>=0.4",
    "cloudpickle",
    "datasets",
    "huggingface-hub",
    "math-verify",
    "numpy",
    "pillow",
    "pydantic",
    "pylatexenc",
    "pyrage",
    "rich",
    "safetensors",
    "sympy",
    "termcolor",
    "tiktoken",
    "tinker==0.38.0",
    "tqdm",
    "transformers>=5.7",
)
"""What the cookbook asks for, but for tml-renderers, which only models of another family need."""

PREPARE = Path("examples/cookbook/prepare.py")
TIMEOUT_S = 900
AT_ONCE = 2


@dataclass(frozen=True)
class Recipe:
    """A run of one recipe, and what has to become of one of its metrics."""

    name: str
    module: str
    options: dict[str, str]
    metric: str
    by: float
    """By how much it has to rise, or to fall if negative, from the mean of the first steps to that of the last."""
    resumed: bool = False
    """Kill it after some steps and start it again."""
    needs: Sequence[str] = field(default=())
    """Further metrics that must be there."""


LOOP = {"batch_size": "16", "learning_rate": "3e-3", "save_every": "2"}
RL = {"batch_size": "8", "group_size": "8", "max_tokens": "14", "learning_rate": "4e-3", "max_steps": "16"}

RECIPES = (
    Recipe("sl_loop", "sl_loop", {**LOOP, "max_steps": "12"}, "train_mean_nll", -1.0, resumed=True),
    *(
        Recipe(f"rl_loop {loss}", "rl_loop", {**RL, "loss_fn": loss}, "reward/total", 0.2)
        for loss in ("importance_sampling", "cispo", "gspo")
    ),
    Recipe(
        "sl_basic",
        "sl_basic",
        {"max_steps": "6", "save_every": "3", "eval_every": "3", "learning_rate": "3e-3"},
        "train_mean_nll",
        -0.5,
        needs=("test/nll",),
    ),
    Recipe(
        "rl_basic",
        "rl_basic",
        {"max_steps": "3", "max_tokens": "14", "save_every": "2", "eval_every": "2", "learning_rate": "1e-2"},
        "env/all/reward/total",
        0.07,
    ),
    Recipe(
        "dpo",
        "preference.dpo.train",
        {"dataset": "hhh", "batch_size": "16", "learning_rate": "2e-3", "max_steps": "10"},
        "dpo_loss",
        -0.3,
        needs=("accuracy",),
    ),
)


class Runner:
    """Runs recipes in the prepared folder `work`, each with a folder of its own for its log.

    Args:
        python: Of the environment that has the cookbook.
        work: What examples/cookbook/prepare.py made.
        url: Of the server.
        options: These take precedence over the recipes' own.
    """

    def __init__(self, python: Path, work: Path, url: str, options: dict[str, str]):
        self.python, self.work, self.url, self.options = python, work, url, options

    def run(self, recipe: Recipe) -> dict[str, Any]:
        """What the recipe's metric did, what is wrong with that, and the seconds it took."""
        start = time.monotonic()
        try:
            found = self._run(recipe)
        except (RuntimeError, ValueError) as error:
            found = {"problems": [str(error)]}
        found |= {"metric": recipe.metric, "by": recipe.by, "seconds": round(time.monotonic() - start, 1)}
        found["status"] = "failed" if found["problems"] else "ok"
        print(f"{recipe.name}: {found}", file=sys.stderr, flush=True)
        return found

    def _run(self, recipe: Recipe) -> dict[str, Any]:
        log = self.work / "runs" / recipe.name.replace(" ", "-")
        problems = []
        if recipe.resumed:
            self._execute(recipe, log, stop_after=6)
            before = list(read_metrics(log))
            self._execute(recipe, log)
            problems = compare_resumed(recipe, before, list(read_metrics(log)))
        else:
            self._execute(recipe, log)
        found = judge(recipe, list(read_metrics(log)))
        return {**found, "problems": problems + found["problems"]}

    def _execute(self, recipe: Recipe, log: Path, stop_after: int | None = None) -> None:
        """Run it to its end, or kill it once it has logged `stop_after` steps."""
        options = {"base_url": self.url, "model_name": MODEL, "log_path": str(log)}
        options |= {**recipe.options, **self.options}
        command = [str(self.python), "-m", f"tinker_cookbook.recipes.{recipe.module}"]
        command += [f"{name}={value}" for name, value in options.items()]
        environment = variables(TINKER_API_KEY="tml-cookbook", HF_HUB_OFFLINE="1", TINKER_TELEMETRY="0")
        output = log.parent / f"{log.name}.txt"
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("a") as out:
            process = subprocess.Popen(
                command, cwd=self.work, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
            deadline = time.monotonic() + TIMEOUT_S
            while process.poll() is None:
                if stop_after is not None and len(list(read_metrics(log))) >= stop_after:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    return
                if time.monotonic() > deadline:
                    process.kill()
                    process.wait()
                    raise RuntimeError(f"not done after {TIMEOUT_S} s:\n{output.read_text()[-3000:]}")
                time.sleep(0.1)
        if process.returncode:
            raise RuntimeError(f"exited with status {process.returncode}:\n{output.read_text()[-3000:]}")


def read_metrics(log: Path) -> Iterator[dict]:
    """The rows of the recipe's metrics file that are written in full."""
    path = log / "metrics.jsonl"
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))


def judge(recipe: Recipe, rows: list[dict]) -> dict[str, Any]:
    """What a recipe's metric did over its steps, and what is wrong with that."""
    values = list(
        {row.get("step", place): row[recipe.metric] for place, row in enumerate(rows) if recipe.metric in row}.values()
    )
    if not values:
        return {"problems": [f"no {recipe.metric} in {[sorted(row) for row in rows]}"]}
    edge = max(1, len(values) // 4)
    first, last = sum(values[:edge]) / edge, sum(values[-edge:]) / edge
    problems = [f"no {name} in its metrics" for name in recipe.needs if not any(name in row for row in rows)]
    gain, wanted = (last - first, recipe.by) if recipe.by > 0 else (first - last, -recipe.by)
    if not gain >= wanted:  # which NaN is not, either
        problems.append(f"{recipe.metric} did not change by {recipe.by:+}: {values}")
    return {"first": first, "last": last, "steps": len(values), "problems": problems}


def compare_resumed(recipe: Recipe, before: list[dict], after: list[dict]) -> list[str]:
    """What is wrong: steps that were repeated after the kill must have the values that they had before it."""
    repeated = {row["step"]: row[recipe.metric] for row in after[len(before) :]}
    common = [row for row in before if row["step"] in repeated]
    if not common or 0 in repeated:
        return [f"it did not resume from a checkpoint: steps {sorted(repeated)} after {len(before)} steps"]
    return [
        f"step {row['step']} was {row[recipe.metric]} before the kill, {repeated[row['step']]} after"
        for row in common
        if abs(row[recipe.metric] - repeated[row["step"]]) > 1e-3
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", nargs="*", help="names; all if none is given")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="for every recipe")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip calls the torch to install")
    parser.add_argument("--out", type=Path, default=Path("build/cookbook.json"))
    arguments = parser.parse_args()
    recipes = {recipe.name: recipe for recipe in RECIPES}
    if unknown := set(arguments.recipe) - set(recipes):
        parser.error(f"no recipe {sorted(unknown)}; there are {list(recipes)}")
    chosen = [recipes[name] for name in arguments.recipe or recipes]
    overridden = dict(option.split("=", 1) for option in arguments.option)

    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(FOLDER / "xla"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    start = time.monotonic()
    python = environment("cookbook", [*DEPENDENCIES, arguments.torch], [COOKBOOK])
    made = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cookbook-") as name:
        work = Path(name) / "work"
        subprocess.run([str(python), str(PREPARE), "--out", str(work)], check=True, env=variables())
        prepared = time.monotonic()
        options = {"model-aliases": MODEL}
        with (
            LocalServer(Path(name) / "server", str(work / MODEL), options) as server,
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):
            runner = Runner(python, work, server.url, overridden)
            results = dict(zip([recipe.name for recipe in chosen], pool.map(runner.run, chosen), strict=True))
            errors = errors_of(server)
    summary = {
        "date": date.today().isoformat(),
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "recipes": results,
        "errors": errors,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(summary, indent=1))

    print(f"\n{recipes_as_markdown(summary)}")
    for name, found in results.items():
        for problem in found["problems"]:
            print(f"{name}: {problem}")
    for line in errors:
        print(f"server: {line}")
    failed = sum(found["status"] == "failed" for found in results.values())
    took = {"environment": made - start, "preparation": prepared - made, "all": time.monotonic() - start}
    print(", ".join(f"{name}: {seconds:.0f} s" for name, seconds in took.items()))
    print(f"{len(results) - failed} passed, {failed + len(errors)} failed")
    return 1 if failed or errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
