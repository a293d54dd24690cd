"""Sampling speed of the server, and the time that samples wait for each other.

Run: `python benchmarks/bench_sampling.py --models tiny medium`. Through the stock SDK unless a case says otherwise.
Four adapters of rank 32 on all linear layers, in turn; temperature 1, log-probabilities on, prompts of 64 tokens, stops
disabled, so that every sequence reaches its `max_tokens`. The first round of each case, which may compile, is not
counted. Prints one JSON line per case.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import model_shapes
from common import RANK, emit, peak_flops, sequence, serving
from skyrl.backends.planning import flops

PROMPT, NEW = 64, 128
ADAPTERS = 4


class Samplers:
    """Published adapters of a live server, and rounds of requests to them."""

    def __init__(self, client, server, adapters: int):
        self.trainers = [
            client.create_lora_training_client(server.base_model, rank=RANK, seed=seed).result()
            for seed in range(adapters)
        ]
        self.samplers = [trainer.save_weights_and_get_sampling_client().result() for trainer in self.trainers]
        self.rounds = 0

    def submit(self, prompt: list[int], max_tokens: int, samples: int = 1, adapter: int = 0):
        """Request samples. Returns the future."""
        import tinker

        params = tinker.SamplingParams(max_tokens=max_tokens, seed=self.rounds, stop=[])
        return self.samplers[adapter % len(self.samplers)].sample(tinker.ModelInput.from_ints(prompt), samples, params)

    def fresh(self, length: int, number: int) -> list[int]:
        """A new prompt."""
        return sequence(length, 100_000 * self.rounds + number)

    def decode(self, limits: list[int], prompt: int = PROMPT) -> float:
        """Seconds until requests with these limits are answered, over all adapters in turn."""
        self.rounds += 1
        start = time.perf_counter()
        futures = [self.submit(self.fresh(prompt, i), limit, adapter=i) for i, limit in enumerate(limits)]
        for future, limit in zip(futures, limits, strict=True):
            assert len(future.result().sequences[0].tokens) == limit
        return time.perf_counter() - start

    def first_tokens(self, requests: int, prompts: int, samples: int = 1, length: int = 512) -> float:
        """Seconds until all of this many requests, with this many different prompts, have their first token."""
        self.rounds += 1
        start = time.perf_counter()
        futures = [self.submit(self.fresh(length, i % prompts), 1, samples) for i in range(requests)]
        for future in futures:
            assert len(future.result().sequences) == samples
        return time.perf_counter() - start

    def short(self) -> float:
        """Seconds of a short request."""
        self.rounds += 1
        start = time.perf_counter()
        self.submit(self.fresh(16, 0), 8).result()
        return time.perf_counter() - start

    def short_beside(self, times: int) -> list[float]:
        """Seconds of short requests while 8 long requests run."""
        self.rounds += 1
        futures = [self.submit(self.fresh(16, i), 512) for i in range(8)]
        self.short()  # answered after the first of the long ones has started
        seconds = []
        for _ in range(times):
            seconds.append(self.short())
            if any(future.future().done() for future in futures):
                seconds.pop()
                break
        for future in futures:
            future.result()
        return seconds

    def publish(self) -> float:
        """Seconds from publishing the current weights to their first token."""
        import tinker

        self.rounds += 1
        start = time.perf_counter()
        sampler = self.trainers[0].save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=1, seed=0, stop=[])
        sampler.sample(tinker.ModelInput.from_ints(self.fresh(16, 0)), 1, params).result()
        return time.perf_counter() - start


def median(measure: Callable[[], float], repeats: int) -> float:
    """Median of `repeats` runs, after a warm-up run."""
    measure()
    return statistics.median(measure() for _ in range(repeats))


def decode_phase(model: str, repeats: int) -> float:
    """Tokens per second of the sampler in this process, after all prompts are read."""
    from dataclasses import asdict

    from skyrl.backends.jax.backend import JaxBackend
    from skyrl.backends.jax.config import JaxBackendConfig
    from skyrl.backends.operations import CreateModel, Publish, Sample
    from skyrl.tx.synthetic.make_model import make_model
    from skyrl.types import LoraConfig, SamplingParams

    with TemporaryDirectory(prefix="skyrl-bench-") as scratch:
        folder = make_model(Path(scratch) / model, arch="qwen3", **asdict(model_shapes.SHAPES[model]), seed=0)
        backend = JaxBackend(str(folder), JaxBackendConfig())
        for seed in range(ADAPTERS):
            name = f"model-{seed}"
            backend.submit(
                CreateModel(request_id=f"create-{seed}", model_id=name, lora_config=LoraConfig(rank=RANK, seed=seed))
            )
            path = str(Path(scratch) / name)
            backend.submit(Publish(request_id=f"publish-{seed}", model_id=name, version=name, path=path, persist=False))
        while backend.busy:
            backend.step()

        def once(number: int) -> float:
            for i in range(32):
                prompt = np.asarray(sequence(PROMPT, 1000 * number + i), np.int32)
                params = SamplingParams(max_tokens=NEW, seed=i, stop=[])
                version = f"model-{i % ADAPTERS}"
                backend.submit(Sample(request_id=f"{number}-{i}", version=version, prompt=prompt, params=params))
            sampler = backend.sampler
            while not sampler.all_started:
                backend.step()
            tokens, start = sampler.tokens_generated, time.perf_counter()
            while backend.busy:
                backend.step()
            return (sampler.tokens_generated - tokens) / (time.perf_counter() - start)

        rates = [once(number) for number in range(repeats + 1)]
        backend.close()
        return statistics.median(rates[1:])


def through_sdk(model: str, repeats: int, report: Callable[..., None]) -> None:
    """Run the cases of one model on a live server."""
    with serving(model) as (client, server):
        samplers = Samplers(client, server, ADAPTERS)

        def rate(limits: list[int]) -> float:
            return sum(limits) / median(lambda: samplers.decode(limits), repeats)

        for requests in (1, 8, 32):
            report(f"{requests} x 128 tokens", tokens_per_s=round(rate([NEW] * requests)))
        limits = np.random.default_rng(0).integers(16, 257, 96).tolist()
        mixed, even = rate(limits), rate([round(sum(limits) / len(limits))] * len(limits))
        report("96 x 16 to 256 tokens", tokens_per_s=round(mixed), share_of_equal=round(mixed / even, 3))
        if model == "tiny":
            latencies(samplers, repeats, report)


def latencies(samplers: Samplers, repeats: int, report: Callable[..., None]) -> None:
    """Measure the time that samples wait for each other."""
    apart = median(lambda: samplers.first_tokens(32, 32), repeats)
    for case, asked in {"32 samples of one prompt": (1, 1, 32), "32 requests of one prompt": (32, 1)}.items():
        together = median(lambda asked=asked: samplers.first_tokens(*asked), repeats)
        times = {"times_faster_than_32_prompts": round(apart / together, 1)}
        report(f"{case} of 512, first token of the last", seconds=round(together, 3), **times)
    alone, beside = median(samplers.short, 3 * repeats), statistics.median(samplers.short_beside(10))
    report("16 + 8 tokens, alone", seconds=round(alone, 4))
    report("16 + 8 tokens beside 8 x 512", seconds=round(beside, 4), times_alone=round(beside / alone, 2))
    report("publish to first token", seconds=round(median(samplers.publish, 3 * repeats), 4))


def main(models: list[str], repeats: int) -> None:
    for model in models:
        peak = peak_flops()
        report = partial(emit, benchmark="sampling", model=model, repeats=repeats, peak_gflops=round(peak / 1e9, 1))
        rate = decode_phase(model, repeats)
        work = flops.decode(model_shapes.SHAPES[model], RANK, PROMPT, NEW) - flops.decode(
            model_shapes.SHAPES[model], RANK, PROMPT, 0
        )
        fraction = work / NEW * rate / peak
        case = "32 x 128 tokens, in process, decode phase"
        report(case=case, tokens_per_s=round(rate), fraction_of_peak=round(fraction, 3))
        through_sdk(model, repeats, lambda case, report=report, **values: report(case=case, **values))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(model_shapes.SHAPES), default=["tiny", "medium"])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    main(arguments.models, arguments.repeats)
