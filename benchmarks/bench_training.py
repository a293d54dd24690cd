"""Tokens per second trained by the server, and as a fraction of the machine's peak.

Run: `python benchmarks/bench_training.py --models tiny medium`. Steps (forward_backward + optim_step, pipelined)
through the stock SDK, rank 32 on all linear layers; the first steps, which compile, are not counted. Compared cases
alternate in one process, because the machine's speed varies: rates are medians over the rounds, ratios are medians of
the ratios within a round. Prints one JSON line per case. `fraction_of_peak` is useful work (planning/flops.py)
relative to the rate of a 2048^3 float32 product in JAX, the best of those measured before and after.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np

import model_shapes
from common import RANK, datum, emit, peak_flops, serving, tenants
from skyrl.backends.planning import flops

LENGTHS = np.random.default_rng(0).integers(16, 513, 64).tolist()
ROWS, MEAN = round(sum(LENGTHS) / 256), round(sum(LENGTHS) / len(LENGTHS))
"""Number of sequences of 256, and length of 64 equal sequences, with the same total number of tokens."""


@dataclass(frozen=True)
class Case:
    """Training work of one round."""

    name: str
    lengths: list[list[int]]
    """Lengths of the sequences in a batch, per adapter. Each adapter belongs to a client with its own key."""
    models: tuple[str, ...] = ("tiny", "medium")


ONE = Case("1 adapter, 16 x 256", [[256] * 16])
EIGHT = Case("8 adapters, 2 x 256 each", [[256] * 2] * 8)
MIXED = Case("64 sequences of 16 to 512", [LENGTHS], ("tiny",))
EQUAL = Case(f"{ROWS} x 256, as many tokens", [[256] * ROWS], ("tiny",))
AVERAGE = Case(f"64 x {MEAN}, as many tokens", [[MEAN] * 64], ("tiny",))
CROWDS = [
    (
        Case(f"{count} adapters, 1 x {length} each", [[length]] * count, ("tiny",)),
        Case(f"1 adapter, 1 x {length}", [[length]], ("tiny",)),
    )
    for count, length in ((7, 512), (5, 128), (7, 32))
]
"""Numbers of adapters that fill no stack, and one of them."""

CASES = [ONE, EIGHT, MIXED, EQUAL, AVERAGE, *(case for pair in CROWDS for case in pair)]
COMPARED = [(EIGHT, ONE), (MIXED, EQUAL), (MIXED, AVERAGE), *CROWDS]


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


def rates(model: str, cases: list[Case], rounds: int, seconds: float) -> tuple[dict[str, list[float]], float]:
    """(tokens per second of each case in each round, peak rate of the machine)."""
    found: dict[str, list[float]] = {case.name: [] for case in cases}
    with serving(model) as (_, server), tenants(server, 8) as clients:
        trainers = [
            client.create_lora_training_client(server.base_model, rank=RANK, seed=seed).result()
            for seed, client in enumerate(clients)
        ]
        batches = {
            case.name: [[datum(length, seed) for seed, length in enumerate(lengths)] for lengths in case.lengths]
            for case in cases
        }
        counts = {}
        for name, batch in batches.items():
            steps(trainers[: len(batch)], batch, 1)
            counts[name] = max(2, round(seconds / steps(trainers[: len(batch)], batch, 1)))
        peak = peak_flops()
        for _ in range(rounds):
            for case in cases:
                elapsed = steps(trainers[: len(case.lengths)], batches[case.name], counts[case.name])
                found[case.name].append(counts[case.name] * sum(map(sum, case.lengths)) / elapsed)
        return found, max(peak, peak_flops())


def main(models: list[str], parts: list[str], rounds: int, seconds: float) -> None:
    for model in models:
        cases = [case for case in CASES if model in case.models and any(part in case.name for part in parts)]
        found, peak = rates(model, cases, rounds, seconds)
        for case in cases:
            rate = statistics.median(found[case.name])
            lengths = [length for one in case.lengths for length in one]
            shape = model_shapes.SHAPES[model]
            work = sum(flops.forward_backward(shape, RANK, length) for length in lengths) / sum(lengths)
            emit(
                benchmark="training",
                case=case.name,
                model=model,
                rounds=rounds,
                tokens_per_s=round(rate),
                gflops=round(work * rate / 1e9, 1),
                peak_gflops=round(peak / 1e9, 1),
                fraction_of_peak=round(work * rate / peak, 3),
            )
        for case, other in COMPARED:
            if case in cases and other in cases:
                pairs = zip(found[case.name], found[other.name], strict=True)
                ratios = sorted(one / another for one, another in pairs)
                emit(
                    benchmark="training, compared",
                    case=case.name,
                    against=other.name,
                    model=model,
                    rounds=rounds,
                    ratio=round(statistics.median(ratios), 3),
                    lowest=round(ratios[0], 3),
                    highest=round(ratios[-1], 3),
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[""], help="parts of the names of cases")
    parser.add_argument("--models", nargs="+", choices=sorted(model_shapes.SHAPES), default=["tiny", "medium"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a case in a round, about; two steps at least")
    arguments = parser.parse_args()
    main(arguments.models, arguments.cases, arguments.rounds, arguments.seconds)
