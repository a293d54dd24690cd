"""Right numbers on the device: the tests marked `gpu`, and what is left after memory has run out."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]


def tests(process: dict[str, Any], *, files: tuple[str, ...], only: str = "") -> dict[str, object]:
    """Outcome of `pytest -m gpu` on some files."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-ra", *files]
    command += ["-k", only] if only else []
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(ended.stdout, flush=True)
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|errors?)", ended.stdout)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    figures: dict[str, object] = {"passed": counts.get("passed", 0), "failed": len(failed)}
    if failed:
        figures["problems"] = failed
    elif ended.returncode:
        figures["problems"] = [f"pytest ended with {ended.returncode}"]
    return figures


def out_of_memory(process: dict[str, Any], *, shape: str) -> dict[str, object]:
    """A training step and samples while other arrays hold nearly all of the device, and the same after they have gone.

    The plan keeps a server from this. Somebody else on the device does not: then a request fails, and no more than it.
    On a CPU nobody knows what memory is left, so that nothing is made to fail there.
    """
    import jax

    from .loaded import Loaded

    loaded = Loaded.of(process, shape)
    (model,) = loaded.models(1)
    data, prompt = [loaded.datum(200) for _ in range(4)], loaded.prompt(100)

    def step() -> None:
        loaded.passes([model], [data])

    def scores() -> list[np.ndarray]:
        """Log-probabilities of the base model, which nothing here trains: of given tokens, and of what it samples."""
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
    """Arrays that leave less than a mebibyte."""
    import jax
    import jax.numpy as jnp

    ballast, size = [], 2**34
    while size >= 2**20:
        try:
            ballast.append(jax.block_until_ready(jnp.zeros(size // 4, jnp.float32)))
        except jax.errors.JaxRuntimeError:
            size //= 2
    return ballast


def _fails(job: Callable[[], object]) -> bool:
    try:
        job()
    except RuntimeError as error:
        print(error, flush=True)
        return True
    return False
