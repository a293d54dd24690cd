"""Seconds until a version can be sampled on an engine, and tokens per second with and without the router.

Run: `python benchmarks/bench_engines.py` with engines of the tests, in NumPy, which measures our side. Or run it with
`--urls http://127.0.0.1:8001 --model MODEL` and vLLM servers with that model (`--max-loras 16 --max-lora-rank 32`,
VLLM_SERVER_DEV_MODE=1, their key in VLLM_API_KEY, and on a CPU `--no-enable-chunked-prefill`). Prompts have 64 tokens;
samples are drawn at temperature 1, with log-probabilities. The first round of each case is not counted. Prints one JSON
line per case:

    sync      seconds from publishing a trained version to its first token on an engine, with and without the
              comparison of each version, and bytes of its files, by rank
    whole     the same for a full model. vLLM on a CPU needs a separate server for it, without LoRA
    samples   tokens per second from one engine directly, and through the router on all engines, with this number
              of adapters in turn (0: the base model), and the fraction of routed samples that engines drew (the
              backend itself draws those for which an engine was not admitted)
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
from skyrl.backends.operations import CreateModel, ForwardBackward, Operation, OptimStep, Publish, Sample
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import AdamParams, Datum, ErrorResponse, LoraConfig, SamplingParams

ROOT = Path(__file__).parents[1]
PROMPT, LONGEST = 64, 256
SIZES: dict[str, Any] = {"arch": "qwen3", "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32}
SIZES |= {"intermediate": 128}
MOST_ADAPTERS, LARGEST_RANK = 16, 32
RANKS = (8, 32)
CASES = ["sync", "samples", "whole"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--urls", nargs="*", default=[], help="engines that run; none: two of the tests' are started")
    parser.add_argument("--model", type=Path, help="folder of their model; with --urls alone")
    parser.add_argument("--folder", type=Path, help="folder for adapters that they see at the same path")
    parser.add_argument("--adapters", nargs="+", type=int, default=[0, 1, 4, 16])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--samples", type=int, default=32, help="samples of a round")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a sample at most")
    parser.add_argument("--repeats", type=int, default=3)
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
            cases = [case for case in arguments.cases if case == "samples" or count == counts[0]]
            for checked in (True, False):
                loras = folder / f"{count}-{checked}"  # otherwise a version with equal weights exists already
                if "sync" in cases or (checked and "samples" in cases):
                    with opened(model, loras, check_every_sync=checked, **engines) as backend:
                        for rank in RANKS if "sync" in cases else ():
                            emit(**sync(backend, loras, rank, arguments.repeats), checked=checked, engines=count)
                        for adapters in arguments.adapters if checked and "samples" in cases else ():
                            emit(**samples(backend, adapters, arguments), engines=count)
                if "whole" in cases:
                    models = folder / f"whole-{checked}"
                    with opened(model, models, check_every_sync=checked, whole=True, **engines) as backend:
                        emit(**sync(backend, models, 0, arguments.repeats), checked=checked, engines=count)


def launch_of(model: Path, count: int) -> dict[str, Any]:
    """Options that launch engines of the tests for a model."""
    sizes = {"max_loras": MOST_ADAPTERS, "max_lora_rank": LARGEST_RANK, "longest": LONGEST}
    served = json.dumps({"model": str(model), "base": str(model), "sizes": sizes})
    command = [sys.executable, "-m", "tests.backends.engines.engine_server", "{port}", served]
    return {"command": command, "count": count, "env": {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}}


@contextmanager
def opened(model: Path, folder: Path, **engines: Any) -> Iterator[TorchBackend]:
    """Open a backend with engines."""
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
    tokens = prompt(rank)
    datum = Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)})
    for number in range(repeats + 1):
        version = f"{model}/{number}"
        run(backend, ForwardBackward(request_id="f", model_id=model, data=[datum], loss_fn="cross_entropy"))
        run(backend, OptimStep(request_id="o", model_id=model, adam_params=AdamParams(learning_rate=1e-4)))
        before = {path.name for path in folder.glob("skyrl-*")}
        begun = time.perf_counter()
        run(backend, Publish(request_id="p", model_id=model, version=version, path=None))
        [drawn] = run(backend, sample("s", version, number, 1))
        times.append(time.perf_counter() - begun)
        assert drawn.sequences[0].origins[0].engine, f"version {version} was not drawn by an engine"
        new = [path for path in folder.glob("skyrl-*") if path.name not in before]
    size = sum(file.stat().st_size for path in new for file in path.iterdir())
    backend.delete_model(model)
    return {"case": "sync", "rank": rank, "bytes": size, "seconds": statistics.median(times[1:])}


def samples(backend: TorchBackend, adapters: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second from one engine directly and through the router, and the fraction drawn by engines."""
    count, repeats, new = arguments.samples, arguments.repeats, arguments.tokens
    names: list[str | None] = [f"adapter {number}" for number in range(adapters)]
    for number, name in enumerate(names):
        assert name is not None
        run(backend, CreateModel(request_id="c", model_id=name, lora_config=LoraConfig(rank=LARGEST_RANK, seed=number)))
        run(backend, Publish(request_id="p", model_id=name, version=name, path=None))
    versions = names or [None]
    routed, on_engines = [], 0
    for turn in range(repeats + 1):
        asked = [sample(str(n), versions[n % len(versions)], turn * count + n, new) for n in range(count)]
        begun = time.perf_counter()
        drawn = run(backend, *asked)
        tokens = sum(len(result.sequences[0].tokens) for result in drawn)
        routed.append(tokens / (time.perf_counter() - begun))
        on_engines = sum(result.sequences[0].origins[0].engine is not None for result in drawn)
    figures = {"routed_tokens_per_s": statistics.median(routed[1:]), "share_on_engines": on_engines / count}
    figures["direct_tokens_per_s"] = asyncio.run(asked_directly(backend, adapters, arguments))
    for name in filter(None, names):
        backend.delete_model(name)
    return {"case": "samples", "adapters": adapters, **figures}


async def asked_directly(backend: TorchBackend, adapters: int, arguments: argparse.Namespace) -> float:
    """Tokens per second of the first engine without a router, with adapters that it has loaded."""
    sampler = backend.sampler
    assert isinstance(sampler, EngineSampler)
    name = next(iter(sampler.fleet.engines))
    options = sampler.options_of(name)
    engine, rates = HttpEngine(name, options), []
    count, repeats, new = arguments.samples, arguments.repeats, arguments.tokens
    loaded = list((await engine.facts()).adapters)
    assert len(loaded) >= adapters
    names = loaded[-adapters:] if adapters else [None]
    room = asyncio.Semaphore(options.max_requests)

    async def one(number: int) -> int:
        name = names[number % len(names)]
        draw = Draw(prompt=prompt(number), adapter=name, max_tokens=new, seed=number, temperature=1.0)
        async with room:
            return len((await engine.generate(draw)).tokens)

    for turn in range(repeats + 1):
        begun = time.perf_counter()
        tokens = await asyncio.gather(*(one(turn * count + number) for number in range(count)))
        rates.append(sum(tokens) / (time.perf_counter() - begun))
    await engine.close()
    return statistics.median(rates[1:])


def prompt(seed: int) -> np.ndarray:
    """Random tokens that are in no cache."""
    return np.random.default_rng(seed).integers(1000, size=PROMPT).astype(np.int32)


def sample(name: str, version: str | None, seed: int, tokens: int) -> Sample:
    params = SamplingParams(max_tokens=tokens, seed=seed, stop=[])
    return Sample(request_id=name, version=version, prompt=prompt(seed), params=params)


def run(backend: TorchBackend, *operations: Operation) -> list[Any]:
    """Run operations, which must succeed. Returns their results."""
    results = backend._finish(list(operations))
    errors = [result for result in results.values() if isinstance(result, ErrorResponse)]
    assert not errors, errors[0]
    return list(results.values())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
