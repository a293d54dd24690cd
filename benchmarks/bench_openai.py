"""The OpenAI routes beside the Tinker API: tokens per second of streams, and the latency of one-token completions.

Run: `python benchmarks/bench_openai.py`. A small base model on this machine. 32 requests of 128 tokens at once, as
streams through the stock `openai` client and as samples through the stock Tinker SDK, by turns; and one request of one
token at a time. The first round of each is not counted. Prints one JSON line per case.
"""

import argparse
import asyncio
import statistics
import time

import openai
import tinker

from common import API_KEY, emit, sequence, serving

AT_ONCE, NEW, PROMPT = 32, 128, 64


def prompt(number: int) -> list[int]:
    return sequence(PROMPT, number)


async def streams(client: openai.AsyncOpenAI, model: str, first: int) -> float:
    """Seconds until all streams have ended."""

    async def one(number: int) -> int:
        events = await client.completions.create(
            model=model,
            prompt=prompt(number),
            max_tokens=NEW,
            stream=True,
            seed=number,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        return sum([len(event.choices[0].token_ids) async for event in events])

    start = time.perf_counter()
    tokens = await asyncio.gather(*(one(first + number) for number in range(AT_ONCE)))
    assert tokens == [NEW] * AT_ONCE
    return time.perf_counter() - start


def samples(sampler: tinker.SamplingClient, first: int) -> float:
    """Seconds until all samples are complete."""
    start = time.perf_counter()
    futures = [
        sampler.sample(
            tinker.ModelInput.from_ints(prompt(first + number)),
            1,
            tinker.SamplingParams(max_tokens=NEW, seed=first + number, stop=[]),
        )
        for number in range(AT_ONCE)
    ]
    for future in futures:
        assert len(future.result().sequences[0].tokens) == NEW
    return time.perf_counter() - start


async def short_completions(client: openai.AsyncOpenAI, model: str, times: int, first: int) -> list[float]:
    """Seconds of completions of one token, one after the other."""
    seconds = []
    for number in range(times):
        start = time.perf_counter()
        await client.completions.create(model=model, prompt=prompt(first + number), max_tokens=1)
        seconds.append(time.perf_counter() - start)
    return seconds


def short_samples(sampler: tinker.SamplingClient, times: int, first: int) -> list[float]:
    """Seconds of samples of one token, one after the other."""
    seconds = []
    for number in range(times):
        start = time.perf_counter()
        request = tinker.ModelInput.from_ints(prompt(first + number))
        sampler.sample(request, 1, tinker.SamplingParams(max_tokens=1)).result()
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="size of the base model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--short", type=int, default=200, help="requests of one token")
    options = parser.parse_args()
    with serving(options.model) as (service, server):
        sampler = service.create_sampling_client(base_model=server.base_model).result()
        taken: dict[str, list[float]] = {"streams": [], "samples": []}
        short: dict[str, list[float]] = {}

        async def measure() -> None:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=API_KEY) as client:
                for number in range(options.rounds + 1):
                    first = 10_000 * number
                    taken["streams"].append(await streams(client, server.base_model, first))
                    taken["samples"].append(await asyncio.to_thread(samples, sampler, first + 5_000))
                await short_completions(client, server.base_model, 20, 500_000)
                short["completion"] = await short_completions(client, server.base_model, options.short, 600_000)
                await asyncio.to_thread(short_samples, sampler, 20, 700_000)
                short["sample"] = await asyncio.to_thread(short_samples, sampler, options.short, 800_000)

        asyncio.run(measure())
        for name, seconds in taken.items():
            emit(case=name, tokens_per_s=AT_ONCE * NEW / statistics.median(seconds[1:]), at_once=AT_ONCE)
        for name, seconds in short.items():
            p50, p99 = (statistics.quantiles(seconds, n=100)[at] * 1000 for at in (49, 98))
            emit(case=f"one token: {name}", p50_ms=p50, p99_ms=p99)


if __name__ == "__main__":
    main()
