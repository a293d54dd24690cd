"""Runs recipes of tinker-cookbook, as they are, against a live server, and reads in their own metrics what they learnt.

Run: `python -m tests.cookbook.run [RECIPE ...]` in the project's folder; `make cookbook` does. `--backend` and
`--backend-config` are those of `skyrl serve`. Needs no network once the environment is made. Writes
`build/cookbook.json`, for the table in docs/compatibility.md. Exits with status 1 if a recipe fails, if its loss does
not fall or its reward does not rise, if the server logged an error, or if a file of the cookbook is not the one of its
wheel. That it can fail is shown by `--option learning_rate=0`: every recipe whose metric has to change must fail.
"""

import argparse
import base64
import csv
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

from skyrl.tinker.local_server import LocalServer
from tests.compat.environments import FOLDER, environment, variables
from tests.compat.run import errors_of
from tests.compat.table import recipes_as_markdown
from tests.cookbook.recipes import GIVEN, MODEL, RECIPES, TEACHER, Recipe

COOKBOOK = "tinker-cookbook==0.6.1"
TORCH = "torch==2.13.0"
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
    "peft",
    "pillow",
    "pydantic",
    "pylatexenc",
    "pyrage",
    "rich",
    "safetensors",
    "sympy",
    "termcolor",
    "textarena",
    "tiktoken",
    "tinker==0.38.0",
    "tqdm",
    "transformers>=5.7",
)
"""Packages of the cookbook and its recipes, but for tml-renderers, which only models of another family need; and PEFT,
to check its weights tools with."""

PREPARE = Path("examples/cookbook/prepare.py")
TIMEOUT_S = 900
KILLED_AFTER = 7
"""Steps: one more than there are before a checkpoint, so that it is repeated, and long before the next checkpoint."""
AT_ONCE = 2


def cookbook(torch: str = TORCH) -> Path:
    """The Python of an environment with the cookbook. Raises `RuntimeError` if it cannot be made."""
    return environment("cookbook", [*DEPENDENCIES, torch], [COOKBOOK])


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
        self.found: dict[str, Future[dict[str, Any]]] = {}

    def run_all(self, recipes: Sequence[Recipe]) -> dict[str, dict[str, Any]]:
        """Run recipes AT_ONCE at a time, in this order: one that others need comes before. Return their results."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                for recipe in recipes:
                    self.found[recipe.name] = pool.submit(self.run, recipe)
                return {name: found.result() for name, found in self.found.items()}
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def run(self, recipe: Recipe) -> dict[str, Any]:
        """Run a recipe. Return its metric's values, the problems with them, and the seconds it took."""
        if recipe.after:
            self.found[recipe.after].result()
        start = time.monotonic()
        try:
            found = self._run(recipe)
        except (RuntimeError, ValueError) as error:
            found = {"problems": [str(error)]}
        found |= {"metric": recipe.metric, "by": recipe.by, "below": dict(recipe.below)}
        found["seconds"] = round(time.monotonic() - start, 1)
        found["status"] = "failed" if found["problems"] else "ok"
        print(f"{recipe.name}: {found}", file=sys.stderr, flush=True)
        return found

    def _run(self, recipe: Recipe) -> dict[str, Any]:
        log, before = self._log(recipe.name), []
        options = {**GIVEN, **recipe.options, **self.options}
        if recipe.data is not None:
            self._execute(recipe, *recipe.data)
        if recipe.resumed:
            self._execute(recipe, recipe.module, options, stop_after=KILLED_AFTER)
            before = list(read_metrics(log))
        self._execute(recipe, recipe.module, options)
        rows = list(read_metrics(log))
        found = judge(recipe, rows)
        if recipe.resumed:
            found["problems"] += compare_resumed(recipe, before, rows)
        return found

    def _log(self, name: str) -> Path:
        return self.work / "runs" / name.replace(" ", "-")

    def _places(self, recipe: Recipe) -> dict[str, str]:
        """Return the places that options may name."""
        places = {"log": str(self._log(recipe.name))}
        if recipe.after:
            path = self._log(recipe.after) / "checkpoints.jsonl"
            if not path.exists():
                raise RuntimeError(f"{recipe.after} left no checkpoint")
            last = json.loads(path.read_text().splitlines()[-1])
            places |= {"state": last["state_path"], "sampler": last["sampler_path"]}
        return places

    def _execute(self, recipe: Recipe, module: str, options: Mapping[str, str], stop_after: int | None = None) -> None:
        """Run a module, or a file, to its end, or kill it once it has logged `stop_after` steps."""
        log, places = self._log(recipe.name), self._places(recipe)
        program = (
            [str(Path(module).resolve())] if module.endswith(".py") else ["-m", f"tinker_cookbook.recipes.{module}"]
        )
        command = [
            str(self.python),
            *program,
            *(f"{name}={value.format_map(places)}" for name, value in options.items()),
        ]
        environment = variables(
            TINKER_BASE_URL=self.url, TINKER_API_KEY="tml-cookbook", HF_HUB_OFFLINE="1", TINKER_TELEMETRY="0"
        )
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
                time.sleep(0.02)
        if process.returncode:
            raise RuntimeError(f"exited with status {process.returncode}:\n{output.read_text()[-3000:]}")


def read_metrics(log: Path) -> Iterator[dict]:
    """The rows of the recipe's metrics file that are written in full."""
    path = log / "metrics.jsonl"
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))


def judge(recipe: Recipe, rows: list[dict]) -> dict[str, Any]:
    """Return the values of a recipe's metric over its steps, and the problems with them."""
    values = list(
        {row.get("step", place): row[recipe.metric] for place, row in enumerate(rows) if recipe.metric in row}.values()
    )
    if not values:
        return {"problems": [f"no {recipe.metric} in {[sorted(row) for row in rows]}"]}
    edge = max(1, len(values) // 4)
    first, last = sum(values[:edge]) / edge, sum(values[-edge:]) / edge
    problems = [f"no {name} in its metrics" for name in recipe.needs if not any(name in row for row in rows)]
    change = last - first
    if not math.isfinite(change) or (recipe.by and change / recipe.by < 1):
        problems.append(f"{recipe.metric} did not change by {recipe.by:+}: {values}")
    for name, bound in recipe.below.items():
        sizes = [abs(row[name]) for row in rows if name in row]
        if not sizes or not all(size < bound for size in sizes):
            problems.append(f"{name} is not below {bound} at every step: {sizes}")
    return {"first": first, "last": last, "steps": len(values), "problems": problems}


def compare_resumed(recipe: Recipe, before: list[dict], after: list[dict]) -> list[str]:
    """Return the problems of a resumed run: steps repeated after the kill must keep the values that they had before."""
    repeated = {row["step"]: row[recipe.metric] for row in after[len(before) :]}
    common = [row for row in before if row["step"] in repeated]
    if not common or 0 in repeated:
        return [f"it did not resume from a checkpoint: steps {sorted(repeated)} after {len(before)} steps"]
    return [
        f"step {row['step']} was {row[recipe.metric]} before the kill, {repeated[row['step']]} after"
        for row in common
        if abs(row[recipe.metric] - repeated[row["step"]]) > 1e-3
    ]


def altered_files(python: Path) -> list[str]:
    """Files of the cookbook in an environment that are not those of its wheel, by their hash, and further modules."""
    (record,) = (python.parents[1] / "lib").glob("python*/site-packages/tinker_cookbook-*.dist-info/RECORD")
    folder = record.parents[1]
    wanted = {row[0]: row[1] for row in csv.reader(record.read_text().splitlines()) if row[1]}
    modules = [str(path.relative_to(folder)) for path in (folder / "tinker_cookbook").rglob("*.py")]
    return [name for name in sorted({*wanted, *modules}) if wanted.get(name) != record_hash(folder / name)]


def record_hash(path: Path) -> str:
    """As in the RECORD of a wheel (https://packaging.python.org/specifications/recording-installed-packages)."""
    digest = hashlib.sha256(path.read_bytes()).digest() if path.exists() else b""
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def with_what_they_need(chosen: Sequence[Recipe]) -> list[Recipe]:
    """The recipes, and those that must come before them."""
    names = {recipe.name for recipe in chosen} | {recipe.after for recipe in chosen}
    return [recipe for recipe in RECIPES if recipe.name in names]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", nargs="*", help="names; all if none is given")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="for every recipe")
    parser.add_argument(
        "--prepared", type=Path, help="a folder that prepare.py made before; copied, so it stays as it is"
    )
    parser.add_argument("--backend", help="of the server; jax if none is given")
    parser.add_argument("--backend-config", metavar="JSON", help="options of the backend")
    parser.add_argument("--torch", default=TORCH, help="what pip calls the torch to install")
    parser.add_argument("--out", type=Path, default=Path("build/cookbook.json"))
    arguments = parser.parse_args()
    recipes = {recipe.name: recipe for recipe in RECIPES}
    if unknown := set(arguments.recipe) - set(recipes):
        parser.error(f"no recipe {sorted(unknown)}; there are {list(recipes)}")
    chosen = with_what_they_need([recipes[name] for name in arguments.recipe or recipes])
    overridden = dict(option.split("=", 1) for option in arguments.option)

    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(FOLDER / "xla"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    start = time.monotonic()
    python = cookbook(arguments.torch)
    made = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cookbook-") as name:
        work = Path(name) / "work"
        if arguments.prepared:
            shutil.copytree(arguments.prepared, work)
        else:
            subprocess.run([str(python), str(PREPARE), "--out", str(work)], check=True, env=variables())
        prepared = time.monotonic()
        given = {"backend": arguments.backend, "backend-config": arguments.backend_config}
        options = {"model-aliases": f"{MODEL},{TEACHER}"} | {name: value for name, value in given.items() if value}
        with LocalServer(Path(name) / "server", str(work / MODEL), options) as server:
            results = Runner(python, work, server.url, overridden).run_all(chosen)
            errors = errors_of(server)
    altered = altered_files(python)
    summary = {
        "date": date.today().isoformat(),
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "backend": arguments.backend or "jax",
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
    for name in altered:
        print(f"not the file of the wheel: {name}")
    failed = sum(found["status"] == "failed" for found in results.values())
    took = {"environment": made - start, "preparation": prepared - made, "all": time.monotonic() - start}
    print(", ".join(f"{name}: {seconds:.0f} s" for name, seconds in took.items()))
    print(
        f"{len(results) - failed} passed, {failed + len(errors)} failed; {len(altered)} files of the cookbook altered"
    )
    return 1 if failed or errors or altered else 0


if __name__ == "__main__":
    raise SystemExit(main())
