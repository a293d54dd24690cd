"""How many tokens a second does the server sample: one request, 32 at once, and 32 of different lengths?

Run: `python benchmarks/bench_decode.py --models tiny medium`. Samples of a published rank-32 adapter through the stock
SDK, prompts of 32 tokens, stops disabled so that every sequence reaches its `max_tokens`. A first round of the same
requests, which compiles, is not counted. Prints one JSON line per case; `tokens_per_s` counts generated tokens.
"""

import argparse
import statistics
import time

import flops
from common import RANK, emit, peak_flops, sequence, serving

PROMPT = 32
CASES = {
    "1 request, 128 tokens": [128],
    "32 requests, 128 tokens": [128] * 32,
    "32 requests, 8 to 256 tokens": [8 * (1 + i) for i in range(32)],
}
"""Case: `max_tokens` of each request."""


def round_of(sampler, limits: list[int], seed: int) -> float:
    """Seconds until all requests are answered."""
    import tinker

    start = time.perf_counter()
    futures = []
    for i, limit in enumerate(limits):
        params = tinker.SamplingParams(max_tokens=limit, seed=seed + i, stop=[])
        prompt = tinker.ModelInput.from_ints(sequence(PROMPT, seed + i))
        futures.append(sampler.sample(prompt, 1, params))
    for future, limit in zip(futures, limits, strict=True):
        assert len(future.result().sequences[0].tokens) == limit
    return time.perf_counter() - start


def main(models: list[str], repeats: int) -> None:
    for model in models:
        shape = flops.SHAPES[model]
        with serving(model) as (client, server):
            peak = peak_flops()
            trainer = client.create_lora_training_client(server.base_model, rank=RANK, seed=0).result()
            sampler = trainer.save_weights_and_get_sampling_client().result()
            for case, limits in CASES.items():
                round_of(sampler, limits, 0)
                elapsed = statistics.median(round_of(sampler, limits, 1000 * (1 + i)) for i in range(repeats))
                work = sum(flops.decode(shape, RANK, PROMPT, limit) for limit in limits)
                emit(
                    benchmark="decode",
                    case=case,
                    model=model,
                    repeats=repeats,
                    tokens_per_s=round(sum(limits) / elapsed),
                    seconds=round(elapsed, 2),
                    peak_gflops=round(peak / 1e9, 1),
                    fraction_of_peak=round(work / elapsed / peak, 4),
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(flops.SHAPES), default=["tiny", "medium"])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    main(arguments.models, arguments.repeats)
