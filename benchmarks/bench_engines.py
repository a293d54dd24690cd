"""Seconds until a version is sampled on an engine, and samples a second that go through the router.

Run: `python benchmarks/bench_engines.py` (engines of the tests, in NumPy: what is measured is our side), or with
`--urls http://127.0.0.1:8001 --model MODEL` (servers of vLLM with that model, `--max-loras 16 --max-lora-rank 32`,
VLLM_SERVER_DEV_MODE=1, their key in VLLM_API_KEY, and on a CPU `--no-enable-chunked-prefill`). Samples are of 64 tokens
after 64, temperature 1, with log-probabilities. A first round of each case is not counted. Prints one JSON line per
case:

    sync      seconds from publishing a version to its first token on an engine, with and without the comparison of
              each version, and bytes of its files, by rank (0: all weights of the model)
    samples   samples a second of one engine asked directly, and through the router on all engines, with so many
              adapters in turn (0: the base model)
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from common import emit
from skyrl.backends.engines.http_engine import HttpEngine
from skyrl.backends.engines.protocol import Draw
from skyrl.backends.engines.sampler import EngineSampler
from skyrl.backends.operations import CreateModel, Operation, Publish, Sample
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import ErrorResponse, LoraConfig, SamplingParams

ROOT = Path(__file__).parents[1]
PROMPT, NEW, LONGEST = 64, 64, 256
SIZES: dict[str, Any] = {"arch": "qwen3", "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32}
SIZES |= {"intermediate": 128}
MOST_ADAPTERS, LARGEST_RANK = 16, 32
RANKS = (8, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--urls", nargs="*", default=[], help="engines that run; none: two of the tests' are started")
    parser.add_argument("--model", type=Path, help="folder of their model; with --urls alone")
    parser.add_argument("--folder", type=Path, help="folder for adapters that they see at the same path")
    parser.add_argument("--adapters", nargs="+", type=int, default=[0, 1, 4, 16])
    parser.add_argument("--samples", type=int, default=128, help="samples of a round")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if bool(arguments.urls) != bool(arguments.model):
        parser.error("--urls and --model go together")
    with TemporaryDirectory() as scratch:
        model = arguments.model or Path(scratch) / "model"
        if not arguments.urls:
            make_model(model, **SIZES, seed=0)
        folder = arguments.folder or Path(scratch) / "adapters"
        counts = [len(arguments.urls)] if arguments.urls else [1, 2]
        for count in counts:
            engines = {"urls": arguments.urls} if arguments.urls else {"launch": launch_of(model, count)}
            for checked in (True, False):
                loras = folder / f"{count}-{checked}"  # else a version of equal weights is there already
                with opened(model, loras, check_every_sync=checked, **engines) as backend:
                    if count == counts[0]:
                        for rank in RANKS:
                            emit(
                                **sync(backend, loras, rank, arguments.repeats),
                                checked=checked,
                                engines=count,
                            )
                    if checked:
                        for adapters in arguments.adapters:
                            emit(**samples(backend, adapters, arguments.samples, arguments.repeats), engines=count)
                if count == counts[0]:
                    models = folder / f"whole-{checked}"
                    with opened(model, models, check_every_sync=checked, whole=True, **engines) as backend:
                        emit(**sync(backend, models, 0, arguments.repeats), checked=checked, engines=count)


def launch_of(model: Path, count: int) -> dict[str, Any]:
    """Engines of the tests that serve a model."""
    sizes = {"max_loras": MOST_ADAPTERS, "max_lora_rank": LARGEST_RANK, "longest": LONGEST}
    served = json.dumps({"model": str(model), "base": str(model), "sizes": sizes})
    command = [sys.executable, "-m", "tests.backends.engines.engine_server", "{port}", served]
    return {"command": command, "count": count, "env": {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}}


@contextmanager
def opened(model: Path, folder: Path, **engines: Any) -> Iterator[TorchBackend]:
    """A backend on engines."""
    given = {"folder": str(folder), "max_loras": MOST_ADAPTERS, "max_requests": 64} | engines
    sizes = {"max_lora_rank": LARGEST_RANK, "max_context_length": LONGEST, "dtype": "float32", "engines": given}
    backend = TorchBackend(str(model), TorchBackendConfig.model_validate(sizes))
    try:
        yield backend
    finally:
        backend.close()


def sync(backend: TorchBackend, folder: Path, rank: int, repeats: int) -> dict[str, Any]:
    """Seconds from publishing to the first token."""
    times, model, new = [], f"rank {rank} {time.monotonic()}", list[Path]()
    run(backend, CreateModel(request_id="create", model_id=model, lora_config=LoraConfig(rank=rank, seed=rank)))
    for number in range(repeats + 1):
        version = f"{model}/{number}"
        run(backend, CreateModel(request_id="c", model_id=version, lora_config=LoraConfig(rank=rank, seed=number)))
        before = {path.name for path in folder.glob("skyrl-*")}
        begun = time.perf_counter()
        run(backend, Publish(request_id="p", model_id=version, version=version, path=None))
        run(backend, sample("s", version, number, 1))
        times.append(time.perf_counter() - begun)
        new = [path for path in folder.glob("skyrl-*") if path.name not in before]
    size = sum(file.stat().st_size for path in new for file in path.iterdir())
    return {"case": "sync", "rank": rank, "bytes": size, "seconds": statistics.median(times[1:])}


def samples(backend: TorchBackend, adapters: int, count: int, repeats: int) -> dict[str, Any]:
    """Samples a second, of one engine asked directly and through the router."""
    names: list[str | None] = [f"adapter {number}" for number in range(adapters)]
    for number, name in enumerate(names):
        assert name is not None
        run(backend, CreateModel(request_id="c", model_id=name, lora_config=LoraConfig(rank=LARGEST_RANK, seed=number)))
        run(backend, Publish(request_id="p", model_id=name, version=name, path=None))
    versions = names or [None]
    routed = []
    for turn in range(repeats + 1):
        asked = [sample(str(n), versions[n % len(versions)], turn * count + n, NEW) for n in range(count)]
        begun = time.perf_counter()
        run(backend, *asked)
        routed.append(count / (time.perf_counter() - begun))
    for name in filter(None, names):
        backend.delete_model(name)
    figures = {"routed_per_s": statistics.median(routed[1:])}
    figures["direct_per_s"] = asyncio.run(asked_directly(backend, count, repeats))
    return {"case": "samples", "adapters": adapters, **figures}


async def asked_directly(backend: TorchBackend, count: int, repeats: int) -> float:
    """Samples a second of the first engine's base model, without a router."""
    sampler = backend.sampler
    assert isinstance(sampler, EngineSampler)
    name = next(iter(sampler.fleet.engines))
    options = sampler.options_of(name)
    engine, rates = HttpEngine(name, options), []
    await engine.facts()
    room = asyncio.Semaphore(options.max_requests)

    async def one(number: int) -> None:
        draw = Draw(prompt=prompt(number), adapter=None, max_tokens=NEW, seed=number, temperature=1.0)
        async with room:
            await engine.generate(draw)

    for turn in range(repeats + 1):
        begun = time.perf_counter()
        await asyncio.gather(*(one(turn * count + number) for number in range(count)))
        rates.append(count / (time.perf_counter() - begun))
    await engine.close()
    return statistics.median(rates[1:])


def prompt(seed: int) -> np.ndarray:
    """Tokens that nobody has seen."""
    return np.random.default_rng(seed).integers(1000, size=PROMPT).astype(np.int32)


def sample(name: str, version: str | None, seed: int, tokens: int) -> Sample:
    params = SamplingParams(max_tokens=tokens, seed=seed, stop=[])
    return Sample(request_id=name, version=version, prompt=prompt(seed), params=params)


def run(backend: TorchBackend, *operations: Operation) -> None:
    """Finish operations, which must succeed."""
    results = backend._finish(list(operations))
    errors = [result for result in results.values() if isinstance(result, ErrorResponse)]
    assert not errors, errors[0]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
