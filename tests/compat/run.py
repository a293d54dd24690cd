"""Runs the conformance script with every SDK against one live server, and compares what they found.

Run: `python -m tests.compat.run [--sdk VERSION ...] [--backend NAME]` in the project's folder; `make matrix` does.
Writes `build/matrix.json`, from which `table.py` makes the table of docs/compatibility.md, or `build/matrix-NAME.json`
for a backend that is named. Exits with status 1 if a check of any SDK fails, if two SDKs got different numbers, if an
SDK lacks what it is known to have, or if the server logged an error.
"""

import argparse
import json
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from skyrl.tinker.local_server import LocalServer
from tests import oracle
from tests.compat.conformance import TAUGHT
from tests.compat.environments import FOLDER, environment, variables
from tests.compat.table import as_markdown
from tests.live import make_tiny_model

VERSIONS = (
    "0.7.0",
    "0.10.0",
    "0.16.1",
    "0.18.2",
    "0.20.0",
    "0.22.7",
    "0.24.1",
    "0.25.0",
    "0.27.2",
    "0.30.4",
    "0.34.0",
    "0.36.0",
    "0.38.0",
)
SINCE = {
    "topk_sample": "0.30.4",
    "target_logprobs": "0.30.4",
    "alternatives": "0.34.0",
    "last_logprobs": "0.34.0",
    "inflight": "0.38.0",
    "clones": "0.16.1",
    "ttl": "0.16.1",
    "external": "0.30.4",
    "whoami": "0.24.1",
    "finish": "0.27.2",
}
"""The first of these SDKs that has what a check is about. Those that are not named are for all."""
UNTIL = {"archive": "0.34.0"}
"""The last of these SDKs that has it."""
SCRIPT = Path(__file__).parent / "conformance.py"
AT_ONCE = 2
TIMEOUT_S = 300
TOLERANCE = 1e-4
LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:")
"""Start of a message in the server's log; other lines belong to the message before."""


def run_sdk(version: str, torch: str, server: LocalServer) -> dict[str, Any]:
    """The outcomes of one SDK, with the seconds that its environment and its checks took."""
    start = time.monotonic()
    python = environment(version, [f"tinker=={version}", torch])
    made = time.monotonic()
    result = run_script(version, python, server)
    result["seconds"] = {"environment": round(made - start, 1), "checks": round(time.monotonic() - made, 1)}
    print(f"{version}: {result['seconds']}", file=sys.stderr, flush=True)
    return result


def run_script(version: str, python: Path, server: LocalServer, only: Sequence[str] = ()) -> dict[str, Any]:
    """The outcomes of the script, run by the Python that has this SDK. Its output is beside the server's log.

    With `only`, these checks are run, without the others.
    """
    out = server.folder / f"{version}.json"
    command = [str(python), str(SCRIPT), "--url", server.url, "--base-model", str(server.base_model), "--out", str(out)]
    command += ["--only", *only] if only else []
    with (server.folder / f"{version}.log").open("w") as log:
        try:
            code = subprocess.run(
                command, stdout=log, stderr=log, timeout=TIMEOUT_S, cwd=server.folder, env=variables()
            ).returncode
            problem = "" if code == 0 else f"exited with status {code}"
        except subprocess.TimeoutExpired:
            problem = f"not done after {TIMEOUT_S} s"
    result = json.loads(out.read_text()) if out.exists() else {"checks": {}, "values": {}, "split_models": []}
    result["checks"]["run"] = {"status": "failed" if problem else "ok", "detail": problem}
    return result


def arrivals(server: LocalServer, model: str) -> list[int]:
    """The seq_ids of the passes before a model's first optimizer step, in the order in which they arrived."""
    with closing(sqlite3.connect(f"file:{server.folder / 'server.db'}?mode=ro", uri=True)) as database:
        rows = database.execute(
            "select kind, seq_id from requests where model_id = ? order by rowid", [model]
        ).fetchall()
    first_step = min(seq_id for kind, seq_id in rows if kind == "optim_step")
    return [seq_id for kind, seq_id in rows if kind == "forward_backward" and seq_id < first_step]


def check_splits(server: LocalServer, result: dict[str, Any]) -> None:
    """Turns the chunk check red unless the data did come in several requests; notes the order of their arrival."""
    for model in result["split_models"]:
        result["arrival"] = order = arrivals(server, model)
        outcome = result["checks"]["chunks"]
        if len(order) < 2 and outcome["status"] == "ok":
            outcome |= {"status": "failed", "detail": "the SDK sent everything in one request"}


def check_absences(version: str, result: dict[str, Any]) -> None:
    """Turns a check red that says its SDK has no such thing where it is known to have it."""
    place = VERSIONS.index(version)
    for name, outcome in result["checks"].items():
        first, last = SINCE.get(name, VERSIONS[0]), UNTIL.get(name, VERSIONS[-1])
        if outcome["status"] == "absent" and VERSIONS.index(first) <= place <= VERSIONS.index(last):
            outcome |= {"status": "failed", "detail": f"{outcome['detail']}, which {version} has"}


def check_values(results: dict[str, dict[str, Any]], first_loss: float) -> None:
    """Adds a check `values`: the numbers are those of the newest SDK, and the first loss is Hugging Face's."""
    reference = results[list(results)[-1]]["values"]
    for result in results.values():
        problems = []
        for name, value in result["values"].items():
            expected = reference.get(name, value)
            if np.shape(value) != np.shape(expected) or not np.allclose(
                value, expected, rtol=TOLERANCE, atol=TOLERANCE
            ):
                problems.append(f"{name}={value}, with the newest SDK {expected}")
        if not np.allclose(result["values"].get("losses", [np.nan])[0], first_loss, rtol=TOLERANCE):
            problems.append(f"the first loss is not {first_loss}")
        result["checks"]["values"] = {"status": "failed" if problems else "ok", "detail": "; ".join(problems)[:2000]}


def loss_before_training(model: Path) -> float:
    """The loss of `TAUGHT` by Hugging Face's model."""
    return -oracle.logprobs(oracle.load(model), TAUGHT).sum().item()


def errors_of(server: LocalServer) -> list[str]:
    """Return the errors in the server's log, which no request may cause, each with its traceback."""
    found, inside = [], False
    for line in server.log_path.read_text(errors="replace").splitlines():
        if LOGGED.match(line):
            inside = " ERROR " in line or " CRITICAL " in line
            if inside:
                found.append(line)
        elif line.startswith("Traceback") and not inside:
            inside = True
            found.append(line)
        elif inside:
            found[-1] += f"\n{line}"
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sdk", nargs="*", choices=VERSIONS, default=VERSIONS)
    parser.add_argument("--backend", help="of the server; jax if none is given")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip calls the torch to install")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    out = arguments.out or Path("build", f"matrix-{arguments.backend}.json" if arguments.backend else "matrix.json")

    os.environ["TINKER_TELEMETRY"] = "0"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(FOLDER / "xla"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="matrix-") as name:
        model = make_tiny_model(Path(name) / "model" / "tiny")
        first_loss = loss_before_training(model)
        options = {"backend": arguments.backend} if arguments.backend else {}
        with LocalServer(Path(name) / "server", str(model), options) as server, ThreadPoolExecutor(AT_ONCE) as pool:
            # SDKs that do not know the type of external checkpoints fail to list one, and all here are one tenant.
            before = VERSIONS[: VERSIONS.index(SINCE["external"])]
            early = [version for version in arguments.sdk if version in before]
            late = [version for version in arguments.sdk if version not in before]
            results: dict[str, Any] = {}
            for versions in (early, late):
                runs = pool.map(lambda version: run_sdk(version, arguments.torch, server), versions)
                results |= dict(zip(versions, runs, strict=True))
            for version, result in results.items():
                check_splits(server, result)
                check_absences(version, result)
            errors = errors_of(server)
            logs = {version: (server.folder / f"{version}.log").read_text() for version in results}
    check_values(results, first_loss)
    summary = {
        "date": date.today().isoformat(),
        "python": sys.version.split()[0],
        "backend": arguments.backend or "jax",
        "sdks": results,
        "errors": errors,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(summary, indent=1))

    print(as_markdown(summary))
    failed = 0
    for version, result in results.items():
        bad = {name: outcome for name, outcome in result["checks"].items() if outcome["status"] == "failed"}
        failed += len(bad)
        for check, outcome in bad.items():
            print(f"{version} {check}: {outcome['detail']}")
        if bad:
            print(f"--- log of {version}\n{logs[version][-4000:]}")
    for line in errors:
        print(f"server: {line}")
    passed = sum(outcome["status"] == "ok" for result in results.values() for outcome in result["checks"].values())
    print(f"{passed} passed, {failed + len(errors)} failed in {time.monotonic() - start:.0f} s")
    return 1 if failed or errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
