"""Shared parts of the benchmarks: the models, a live server, the machine's peak, and one JSON line per case."""

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np

import model_shapes

RANK = 32
"""Rank of every adapter, on all linear layers."""

API_KEY = "tml-benchmark"


@contextmanager
def serving(name: str, backend_config: dict[str, object] | None = None) -> Iterator[tuple[object, object]]:
    """(service client of the stock SDK, its server) for a random model of the named shape."""
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    import tinker

    from skyrl.tinker.local_server import LocalServer, close_client
    from skyrl.tx.synthetic.make_model import make_model

    with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as scratch:
        folder = Path(scratch) / name
        make_model(folder, arch="qwen3", **asdict(model_shapes.SHAPES[name]), seed=0)
        options = {"backend-config": json.dumps(backend_config or {})}
        with LocalServer(Path(scratch) / "server", str(folder), options) as server:
            client = tinker.ServiceClient(base_url=server.url, api_key=API_KEY)
            yield client, server
            close_client(client)


@contextmanager
def tenants(server, count: int) -> Iterator[list]:
    """Create service clients with different keys, which are different tenants."""
    import tinker

    from skyrl.tinker.local_server import close_client

    clients = [tinker.ServiceClient(base_url=server.url, api_key=f"{API_KEY}-{number}") for number in range(count)]
    yield clients
    for client in clients:
        close_client(client)


def sequence(length: int, seed: int = 0, vocab: int = 256) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def datum(length: int, seed: int = 0):
    """A random sequence of `length` tokens with cross-entropy on all of them."""
    import tinker

    tokens = sequence(length + 1, seed)
    inputs = {"target_tokens": np.asarray(tokens[1:], np.int64), "weights": np.ones(length, np.float32)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def peak_flops(size: int = 2048, repeats: int = 10) -> float:
    """Rate of float32 products of two `[size, size]` matrices in JAX, best of `repeats`."""
    import jax

    left, right = (jax.random.normal(jax.random.key(seed), (size, size)) for seed in range(2))
    product = jax.jit(jax.numpy.matmul)
    product(left, right).block_until_ready()
    best = min(timed(lambda: product(left, right).block_until_ready()) for _ in range(repeats))
    return 2 * size**3 / best


def timed(call) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def seconds_of(call, repeats: int, warm_up: int = 3) -> list[float]:
    """Seconds of each call, after warm-up calls."""
    return [timed(call) for _ in range(warm_up + repeats)][warm_up:]


def milliseconds(times: list[float]) -> dict[str, float]:
    """Median and 90th percentile of times in seconds."""
    return {
        "median_ms": round(1e3 * statistics.median(times), 2),
        "p90_ms": round(1e3 * float(np.percentile(times, 90)), 2),
    }


def machine() -> str:
    """Processor, and the number of its cores that this process may use."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores"


def emit(**fields: object) -> None:
    """Print one result as a JSON line."""
    print(json.dumps({**fields, "machine": machine()}), flush=True)
