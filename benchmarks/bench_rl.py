"""Seconds of one iteration of reinforcement learning, and of its parts.

Run: `python benchmarks/bench_rl.py --models tiny`. Through the stock SDK, with one adapter of rank 32: publish the
weights, sample 8 prompts of 64 tokens 8 times each with 64 new tokens per sample, then forward_backward
(importance_sampling, with the sampled log-probabilities) and optim_step, pipelined. The first iterations, which
compile, are not counted. Prints one JSON line per model with the median seconds of an iteration and of its parts.
"""

import argparse
import statistics
import time

import numpy as np

import model_shapes
from common import RANK, emit, peak_flops, sequence, serving

PROMPTS, SAMPLES, PROMPT, NEW = 8, 8, 64, 64


def rollout_datum(prompt: list[int], sampled, advantage: float):
    """A sample as input for importance sampling. Its prompt has no advantages."""
    import tinker

    tokens = [*prompt, *sampled.tokens]
    rest = len(prompt) - 1
    inputs = {
        "target_tokens": np.asarray(tokens[1:], np.int64),
        "logprobs": np.asarray([0.0] * rest + list(sampled.logprobs), np.float32),
        "advantages": np.asarray([0.0] * rest + [advantage] * len(sampled.tokens), np.float32),
    }
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def iteration(trainer, number: int) -> dict[str, float]:
    """Seconds of each part of one iteration."""
    import tinker

    draws = np.random.default_rng(number)
    times = [time.perf_counter()]
    sampler = trainer.save_weights_and_get_sampling_client().result()
    times.append(time.perf_counter())
    prompts = [sequence(PROMPT, 1000 * number + i) for i in range(PROMPTS)]
    params = tinker.SamplingParams(max_tokens=NEW, temperature=1.0, seed=number, stop=[])
    futures = [sampler.sample(tinker.ModelInput.from_ints(prompt), SAMPLES, params) for prompt in prompts]
    groups = [future.result().sequences for future in futures]
    times.append(time.perf_counter())
    data = []
    for prompt, group in zip(prompts, groups, strict=True):
        rewards = draws.normal(size=SAMPLES)
        for sampled, advantage in zip(group, rewards - rewards.mean(), strict=True):
            assert len(sampled.tokens) == NEW
            data.append(rollout_datum(prompt, sampled, float(advantage)))
    passed = trainer.forward_backward(data, "importance_sampling")
    stepped = trainer.optim_step(tinker.AdamParams(learning_rate=1e-4))
    passed.result()
    stepped.result()
    times.append(time.perf_counter())
    names = ("publish", "sample", "train")
    return {name: end - start for name, start, end in zip(names, times[:-1], times[1:], strict=True)}


def main(models: list[str], repeats: int) -> None:
    for model in models:
        with serving(model) as (client, server):
            trainer = client.create_lora_training_client(server.base_model, rank=RANK, seed=0).result()
            for number in range(3):
                iteration(trainer, number)
            found = [iteration(trainer, 3 + number) for number in range(repeats)]
            peak = peak_flops()
        totals = [sum(parts.values()) for parts in found]
        emit(
            benchmark="reinforcement learning",
            case=f"{PROMPTS} prompts x {SAMPLES} samples x {NEW} tokens",
            model=model,
            repeats=repeats,
            seconds=round(statistics.median(totals), 3),
            p90_s=round(float(np.percentile(totals, 90)), 3),
            **{f"{part}_s": round(statistics.median(parts[part] for parts in found), 3) for part in found[0]},
            peak_gflops=round(peak / 1e9, 1),
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(model_shapes.SHAPES), default=["tiny"])
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    main(arguments.models, arguments.repeats)
