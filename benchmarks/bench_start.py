"""Seconds until a server is ready, and until it has trained its first step or drawn its first sample.

Run: `python benchmarks/bench_start.py --models tiny`. Servers started like `skyrl serve`, one after the other: with an
empty compilation cache, and with the cache left by the first one. A first step is a new model of rank 32,
forward_backward of 16 x 256 tokens and optim_step, through the stock SDK, requested as soon as the server is ready. A
first sample is 16 tokens of the base model after a prompt of 16, of a server of its own. The import of the SDK is not
counted. Prints one JSON line per case with median seconds.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import model_shapes
from common import API_KEY, RANK, datum, emit, peak_flops

BATCH = 16, 256
"""Number of sequences, and tokens of each."""


def start(model: Path, state: Path, cache: Path, request: Callable[[Any, str], None]) -> tuple[float, float]:
    """(seconds until ready, seconds until the request is done) of a new server."""
    import tinker

    from skyrl.tinker.local_server import LocalServer, close_client

    os.environ["SKYRL_CACHE"] = str(cache)
    begun = time.perf_counter()
    with LocalServer(state, str(model), {"backend-config": '{"warm_up": true}'}) as server:
        ready = time.perf_counter() - begun
        client = tinker.ServiceClient(base_url=server.url, api_key=API_KEY)
        request(client, server.base_model or "")
        done = time.perf_counter() - begun
        close_client(client)
    return ready, done


def first_step(client: Any, base_model: str) -> None:
    import tinker

    trainer = client.create_lora_training_client(base_model, rank=RANK, seed=0).result()
    data = [datum(BATCH[1], seed) for seed in range(BATCH[0])]
    passed = trainer.forward_backward(data, "cross_entropy")
    stepped = trainer.optim_step(tinker.AdamParams())
    passed.result()
    stepped.result()


def first_sample(client: Any, base_model: str) -> None:
    import tinker

    sampler = client.create_sampling_client(base_model=base_model).result()
    params = tinker.SamplingParams(max_tokens=16, seed=0)
    sampler.sample(tinker.ModelInput.from_ints(list(range(16))), 1, params).result()


def main(models: list[str], repeats: int) -> None:
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    from skyrl.tx.synthetic.make_model import make_model

    for name in models:
        found: dict[str, list[tuple[float, float]]] = {"empty cache": [], "warm cache": []}
        samples: dict[str, list[float]] = {case: [] for case in found}
        with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as scratch:
            folder = Path(scratch)
            model = make_model(folder / name, arch="qwen3", **asdict(model_shapes.SHAPES[name]), seed=0)
            start(
                model, folder / "discarded", folder / "discarded cache", first_step
            )  # files are now in the system's page cache
            for number in range(repeats):
                for case, times in found.items():
                    times.append(start(model, folder / f"{case} {number}", folder / f"cache {number}", first_step))
                    cache = folder / f"cache of samples {number}"
                    ready, done = start(model, folder / f"{case} {number} sample", cache, first_sample)
                    samples[case].append(done - ready)
        peak = peak_flops()
        steps = {case: statistics.median(done for _, done in times) for case, times in found.items()}
        for case, times in found.items():
            emit(
                benchmark="start",
                case=case,
                model=name,
                repeats=repeats,
                ready_s=round(statistics.median(ready for ready, _ in times), 2),
                first_step_s=round(steps[case], 2),
                first_sample_after_ready_s=round(statistics.median(samples[case]), 2),
                share_of_empty=round(steps[case] / steps["empty cache"], 2),
                peak_gflops=round(peak / 1e9, 1),
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(model_shapes.SHAPES), default=["tiny"])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    main(arguments.models, arguments.repeats)
