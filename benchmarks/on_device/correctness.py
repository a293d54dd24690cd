"""Correctness on the device: the tests marked `gpu`, and recovery after running out of memory."""

import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]


def tests(
    process: dict[str, Any], *, files: tuple[str, ...], limit_s: float, only: str = "", tiny: bool = False
) -> dict[str, object]:
    """Run `pytest -m gpu` on some files, for at most `limit_s` seconds."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-vv", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-W", "default"]  # packages of this machine may emit warnings; the project's own suite is strict
    command += ["-n", "4"] if (os.cpu_count() or 1) >= 8 and importlib.util.find_spec("xdist") else []
    command += [*files, *(["-k", only] if only else [])]
    environment = os.environ | {"COLUMNS": "250", "PYTHONUNBUFFERED": "1"}
    running = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    timer = threading.Timer(limit_s, running.terminate)
    timer.start()
    assert running.stdout is not None
    lines = []
    for line in running.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip())
    timer.cancel()
    return _figures(lines, running.wait(), tiny)


def _figures(lines: list[str], status: int, tiny: bool) -> dict[str, object]:
    """Figures parsed from the output of pytest."""
    ended = [line for line in lines if re.search(r"::.* (PASSED|FAILED|ERROR)|(PASSED|FAILED|ERROR) .*::.*[^.]$", line)]
    failed = [line for line in lines if re.match(r"(FAILED|ERROR) \S+::", line)]
    failed = failed or [line for line in ended if "PASSED" not in line]  # if pytest did not reach its summary
    device = next((line.removeprefix("device: ") for line in lines if line.startswith("device: ")), "")
    problems = failed.copy()
    if status < 0 or (status and not failed):
        problems.append(f"pytest ended with {status}, after {ended[-1] if ended else 'no test'}")
    if not tiny and device.startswith("cpu"):
        problems.append("these tests ran on the CPU, as JAX has found no accelerator")
    passed = sum("PASSED" in line for line in ended)
    figures: dict[str, object] = {"passed": passed, "failed": len(failed), "device": device}
    return figures | ({"problems": problems} if problems else {})


def out_of_memory(process: dict[str, Any], *, shape: str) -> dict[str, object]:
    """Run a training step and samples while other arrays fill nearly all of the device, and again after they are freed.

    The memory plan protects a server from this case, but not from other programs on the device. Then a request fails,
    and only this request. On a CPU, the free memory is unknown, so nothing is made to fail there.
    """
    import jax

    from .loaded import Loaded

    loaded = Loaded.of(process, shape)
    (model,) = loaded.models(1)
    data, prompt = [loaded.datum(200) for _ in range(4)], loaded.prompt(100)

    def step() -> None:
        loaded.passes([model], [data])

    def scores() -> list[np.ndarray]:
        """Log-probabilities of the base model, which is not trained here: of given tokens, and of its samples."""
        passed, sampled = loaded.finish([loaded.reference_pass(model, data), loaded.sampling(None, prompt, 8, 4)])
        rows = [output["logprobs"] for output in passed.loss_fn_outputs]
        return [np.concatenate(rows), *(sequence.logprobs for sequence in sampled.sequences[:1])]

    step()
    before = scores()[0]
    failed = None
    if jax.devices()[0].memory_stats():
        ballast = _fill_device()
        failed = [_fails(step), _fails(scores)]
        del ballast
    step()
    after, *sampled = scores()
    difference = float(np.abs(after - before).max())
    problems = []
    if failed is not None and not any(failed):
        problems.append("nothing failed although the device was full")
    if not (difference < 1e-3 and all(np.isfinite(row).all() for row in sampled)):
        problems.append(f"log-probabilities differ by {difference:.3g} after the device was full")
    figures: dict[str, object] = {"step_and_samples_failed_while_full": failed, "difference_afterwards": difference}
    return figures | ({"problems": problems} if problems else {})


def _fill_device() -> list[Any]:
    """Allocate arrays that leave less than 64 MiB, in few steps: a failing allocation is retried for seconds."""
    import jax
    import jax.numpy as jnp

    ballast: list[Any] = []
    for _ in range(8):
        stats = jax.devices()[0].memory_stats() or {}
        free = stats.get("largest_free_block_bytes") or stats["bytes_limit"] - stats["bytes_in_use"]
        if free < 2**26:
            break
        try:
            ballast.append(jax.block_until_ready(jnp.zeros((free - 2**24) // 4, jnp.float32)))
        except jax.errors.JaxRuntimeError:  # the largest block is not completely available
            ballast.append(jax.block_until_ready(jnp.zeros(free // 8, jnp.float32)))
    return ballast


def _fails(job: Callable[[], object]) -> bool:
    try:
        job()
    except RuntimeError as error:
        print(error, flush=True)
        return True
    return False
