"""How many tokens a second does the server train, and what fraction of the machine is that?

Run: `python benchmarks/bench_training.py --models tiny medium`. Steps (forward_backward + optim_step, pipelined)
through the stock SDK, rank 32 on all linear layers; the first steps, which compile, are not counted. Prints one JSON
line per case. `fraction_of_peak` is useful work (benchmarks/flops.py) over the rate of a 2048^3 float32 product in JAX
measured in the same run.
"""

import argparse
import time

import numpy as np

import flops
from common import RANK, datum, emit, peak_flops, serving

CASES = {
    "1 adapter, 8 x 256": [[256] * 8],
    "8 adapters, 2 x 256 each": [[256] * 2] * 8,
    "1 adapter, 16 mixed lengths 16-512": [np.random.default_rng(0).integers(16, 513, 16).tolist()],
}
"""Case: per adapter, the lengths of its batch."""


def steps(trainers, batches, count: int) -> float:
    """Seconds for `count` steps of every adapter, two in flight for each."""
    import tinker

    adam = tinker.AdamParams(learning_rate=1e-4)
    start = time.perf_counter()
    waiting = []
    for _ in range(count):
        for trainer, batch in zip(trainers, batches, strict=True):
            waiting += [trainer.forward_backward(batch, "cross_entropy"), trainer.optim_step(adam)]
        while len(waiting) > 4 * len(trainers):
            waiting.pop(0).result()
    for future in waiting:
        future.result()
    return time.perf_counter() - start


def main(models: list[str], seconds: float) -> None:
    for model in models:
        shape = flops.SHAPES[model]
        with serving(model) as (client, server):
            peak = peak_flops()
            for case, adapters in CASES.items():
                trainers = [
                    client.create_lora_training_client(server.base_model, rank=RANK, seed=seed).result()
                    for seed in range(len(adapters))
                ]
                batches = [[datum(length, seed) for seed, length in enumerate(lengths)] for lengths in adapters]
                steps(trainers, batches, 1)
                count = max(2, round(seconds / steps(trainers, batches, 1)))
                elapsed = steps(trainers, batches, count)
                lengths = [length for one in adapters for length in one]
                work = count * sum(flops.forward_backward(shape, RANK, length) for length in lengths)
                emit(
                    benchmark="training",
                    case=case,
                    model=model,
                    steps=count,
                    tokens_per_s=round(count * sum(lengths) / elapsed),
                    gflops=round(work / elapsed / 1e9, 1),
                    peak_gflops=round(peak / 1e9, 1),
                    fraction_of_peak=round(work / elapsed / peak, 3),
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(flops.SHAPES), default=["tiny", "medium"])
    parser.add_argument("--seconds", type=float, default=15.0, help="measured time per case, about")
    arguments = parser.parse_args()
    main(arguments.models, arguments.seconds)
