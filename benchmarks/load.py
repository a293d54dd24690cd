"""Load by many concurrent clients of the stock SDK, with measurements of their server's memory and latency.

`put_load` starts client processes at a low priority, makes cheap calls over plain HTTP from a separate process, and
measures the server's memory. The benchmark prints the results; a test asserts that nothing failed.
"""

import asyncio
import http.client
import json
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from threading import Thread
from typing import Any

import numpy as np
import psutil

from skyrl.tinker.local_server import close_client

API_KEY = "tml-load"
CLIENT_NICENESS = 10
"""Niceness of clients, which leave the processor to the server like clients on other machines."""
SAMPLERS_PER_PROCESS = 500
TRAINERS_PER_PROCESS = 8
PROBE_PAUSE_S = 0.02


@dataclass(frozen=True)
class Load:
    """Work of the clients, and its duration."""

    samples: int
    """Number of sample requests that wait at any time."""
    trainers: int
    """Number of training clients, each with its own session and model."""
    seconds: float
    """Duration of the measurement, after the warm-up."""
    warm_up_s: float = 20.0
    """Duration of the warm-up, for compilation. Its work is counted, but not timed."""
    prompt_tokens: int = 16
    max_tokens: int = 16
    batch: tuple[int, int] = (4, 32)
    """Number of sequences of a training pass, and tokens of each."""


@dataclass
class Report:
    """Results of a load."""

    latencies_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each cheap call."""
    memory_mib: dict[str, list[float]] = field(default_factory=dict)
    """Resident memory of each process, at regular intervals."""
    samples: int = 0
    steps: int = 0
    errors: list[str] = field(default_factory=list)


def put_load(url: str, server_pid: int, base_model: str, load: Load) -> Report:
    """Run all clients against a server until they end.

    Args:
        url: URL of the server.
        server_pid: Parent process of the server's processes.
        base_model: Name of the base model.
        load: Load of the clients.
    """
    import tinker

    service = tinker.ServiceClient(base_url=url, api_key=API_KEY)
    trainer = service.create_lora_training_client(base_model, rank=8, seed=0).result()
    paths = [trainer.save_weights_for_sampler(f"v{n}").result().path for n in range(2)]
    context = multiprocessing.get_context("spawn")
    results: Queue[Any] = context.Queue()
    start = context.Value("d", 0.0)
    jobs: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    for n, count in enumerate(_shares(load.samples, SAMPLERS_PER_PROCESS)):
        jobs.append((_sample, (url, paths[n % len(paths)], count, load)))
    for n, count in enumerate(_shares(load.trainers, TRAINERS_PER_PROCESS)):
        jobs.append((_train, (url, base_model, range(n * 100, n * 100 + count), load)))
    jobs.append((_probe, (url, trainer.model_id, load)))
    processes = [context.Process(target=_work, args=(job, args, start, results)) for job, args in jobs]
    for process in processes:
        process.start()
    try:
        return _watch(service, results, start, len(jobs), server_pid, load)
    finally:
        for process in processes:
            process.join(30)
            process.kill()
        close_client(service)


def _watch(service: Any, results: "Queue[Any]", start: Any, jobs: int, server_pid: int, load: Load) -> Report:
    """Wait until all jobs are ready, start them, and collect their reports and the server's memory."""
    report = Report()
    for _ in range(jobs):
        assert results.get(timeout=300) == "ready"
    start.value = time.time()
    deadline = start.value + load.warm_up_s + load.seconds
    while time.time() < deadline:
        if time.time() > start.value + load.warm_up_s:
            for name, mib in memory(server_pid).items():
                report.memory_mib.setdefault(name, []).append(mib)
        time.sleep(0.5)
    for _ in range(jobs):
        part = results.get(timeout=600)
        report.samples += part.samples
        report.steps += part.steps
        report.errors += part.errors
        report.latencies_s |= part.latencies_s
    return report


def memory(server_pid: int) -> dict[str, float]:
    """Resident MiB of a server's processes, by name."""
    found = {}
    root = psutil.Process(server_pid)
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            command = " ".join(process.cmdline())
            name = "engine" if "skyrl.tinker.engine" in command else f"api {process.pid}"
            found[name] = process.memory_info().rss / 2**20
    return found


def _shares(total: int, most: int) -> Iterator[int]:
    """Split `total` into parts of at most `most`."""
    while total > 0:
        yield min(total, most)
        total -= most


# -- in the client processes ------------------------------------------------------------------------------------------


def _work(job: Callable[..., None], args: tuple[Any, ...], start: Any, results: "Queue[Any]") -> None:
    """Run a job in a client process. The job calls `begin` when it is ready, which returns at the common start."""
    report = Report()

    def begin() -> None:
        results.put("ready")
        while not start.value:
            time.sleep(0.01)

    try:
        job(*args, begin, report)
    except BaseException:
        report.errors.append(traceback.format_exc())
    results.put(report)


def _sample(url: str, path: str, count: int, load: Load, begin: Callable[[], None], report: Report) -> None:
    import tinker

    os.nice(CLIENT_NICENESS)
    service = tinker.ServiceClient(base_url=url, api_key=API_KEY)
    sampler = service.create_sampling_client(model_path=path).result()
    rng = np.random.default_rng()
    params = tinker.SamplingParams(max_tokens=load.max_tokens, temperature=1.0, stop=[])
    begin()
    deadline = time.time() + load.warm_up_s + load.seconds

    async def user() -> None:
        while time.time() < deadline:
            prompt = tinker.ModelInput.from_ints(rng.integers(0, 256, load.prompt_tokens).tolist())
            with _noting_errors(report):
                response = await sampler.sample(prompt, 1, params)
                assert len(response.sequences[0].tokens) == load.max_tokens
                report.samples += 1

    async def users() -> None:
        await asyncio.gather(*(user() for _ in range(count)))

    asyncio.run(users())
    close_client(service)


def _train(url: str, base_model: str, seeds: range, load: Load, begin: Callable[[], None], report: Report) -> None:
    import tinker

    os.nice(CLIENT_NICENESS)
    services = [tinker.ServiceClient(base_url=url, api_key=API_KEY) for _ in seeds]
    trainers = [
        service.create_lora_training_client(base_model, rank=8, seed=seed).result()
        for service, seed in zip(services, seeds, strict=True)
    ]
    begin()
    deadline = time.time() + load.warm_up_s + load.seconds

    def user(trainer: Any, seed: int) -> None:
        steps = 0
        while time.time() < deadline:
            with _noting_errors(report):
                data = [_datum(load.batch[1], seed * 1000 + steps + k) for k in range(load.batch[0])]
                forward_backward = trainer.forward_backward(data, "cross_entropy")
                optim_step = trainer.optim_step(tinker.AdamParams(learning_rate=1e-4))
                forward_backward.result()
                optim_step.result()
                steps += 1
                if steps % 5 == 0:
                    trainer.save_weights_and_get_sampling_client().result()
                if steps % 10 == 0:
                    trainer.save_state("latest", overwrite=True).result()
        report.steps += steps

    threads = [Thread(target=user, args=one) for one in zip(trainers, seeds, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for service in services:
        close_client(service)


def _probe(url: str, model_id: str, load: Load, begin: Callable[[], None], report: Report) -> None:
    """Make the cheap calls, one after the other, over one connection."""
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    begin()
    warm, deadline = (time.time() + seconds for seconds in (load.warm_up_s, load.warm_up_s + load.seconds))
    calls = {
        "healthz": ("GET", None),
        "get_server_capabilities": ("GET", None),
        "get_info": ("POST", {"model_id": model_id}),
        "session_heartbeat": ("POST", {"session_id": model_id.split(":")[0]}),
    }
    while time.time() < deadline:
        for name, (method, body) in calls.items():
            content = None if body is None else json.dumps(body)
            headers = {"X-API-Key": API_KEY, "Content-Type": "application/json"}
            called = time.perf_counter()
            connection.request(method, f"/api/v1/{name}", content, headers)
            response = connection.getresponse()
            text = response.read()
            if time.time() > warm:
                report.latencies_s.setdefault(name, []).append(time.perf_counter() - called)
            if response.status != 200:
                report.errors.append(f"{name}: {response.status} {text!r}")
            time.sleep(PROBE_PAUSE_S)
    connection.close()


@contextmanager
def _noting_errors(report: Report) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        report.errors.append(f"{type(error).__name__}: {error}")
        time.sleep(0.1)


def _datum(length: int, seed: int) -> Any:
    import tinker

    tokens = np.random.default_rng(seed).integers(0, 256, length + 1)
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)
