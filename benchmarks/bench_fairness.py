"""Latency of a small training request in the presence of large ones, and of other clients.

Run: `python benchmarks/bench_fairness.py`. The tiny model with adapters of rank 32; every client has its own key.
Through the stock SDK: small requests on an idle server, and while another process continuously trains 64 sequences of
512 tokens; then 100 small requests of one client, and of 8 clients at once. `slowest_over_fastest` compares the
completion times of the clients, `slowest_over_8_alone` the last one with 8 times that of a client alone. In this
process: durations of the engine's turns, one of which a small request may have to wait for while the large batch is
trained. Prints one JSON line per case.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import numpy as np

import model_shapes
from common import API_KEY, RANK, datum, emit, milliseconds, peak_flops, seconds_of, serving, tenants
from skyrl.tinker.local_server import close_client

HEAVY = 64, 512
"""Sequences per large pass, and tokens of each."""
SMALL = 16
"""Tokens of a small pass."""
CLIENTS, REQUESTS = 8, 100


def train_on(url: str, base_model: str, link: Connection) -> None:
    """Train large batches, two in flight, until told to stop."""
    import tinker

    client = tinker.ServiceClient(base_url=url, api_key=f"{API_KEY}-heavy")
    trainer = client.create_lora_training_client(base_model, rank=RANK, seed=100).result()
    data = [datum(HEAVY[1], seed) for seed in range(HEAVY[0])]

    def submit() -> list:
        return [trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(tinker.AdamParams())]

    for future in submit():
        future.result()
    link.send("warm")
    steps = 0
    waiting = [*submit(), *submit()]
    while not link.poll():
        waiting.pop(0).result()
        waiting.pop(0).result()
        steps += 1
        waiting += submit()
    link.send(steps)
    for future in waiting:
        future.result()
    close_client(client)


@contextmanager
def heavy_training(server) -> Iterator[None]:
    """Context in which another tenant trains in another process."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=train_on, args=(server.url, server.base_model, its))
    process.start()
    assert ours.recv() == "warm"
    yield
    ours.send("stop")
    ours.recv()
    process.join()


def latencies(server, repeats: int, report: Callable[..., None]) -> None:
    """Measure small requests, alone and concurrent with large ones."""
    import tinker

    with tenants(server, 1) as (client,):
        trainer = client.create_lora_training_client(server.base_model, rank=RANK, seed=0).result()
        data, adam = [datum(SMALL)], tinker.AdamParams(learning_rate=1e-4)
        calls = {
            f"forward_backward 1x{SMALL}": lambda: trainer.forward_backward(data, "cross_entropy").result(),
            "optim_step": lambda: trainer.optim_step(adam).result(),
        }
        before = {name: seconds_of(call, repeats, 10) for name, call in calls.items()}
        with heavy_training(server):
            beside = {name: seconds_of(call, repeats) for name, call in calls.items()}
        after = {name: seconds_of(call, repeats) for name, call in calls.items()}
    for name in calls:
        alone = before[name] + after[name]
        more = 1e3 * (statistics.median(beside[name]) - statistics.median(alone))
        report(benchmark="fairness, latency", case=name, repeats=2 * repeats, **milliseconds(alone))
        case = f"{name}, beside {HEAVY[0]} x {HEAVY[1]}"
        report(
            benchmark="fairness, latency",
            case=case,
            repeats=repeats,
            **milliseconds(beside[name]),
            more_ms=round(more, 1),
        )


def crowd(server, report: Callable[..., None]) -> None:
    """Measure many small requests of one client, and of several."""
    with tenants(server, CLIENTS) as clients:
        trainers = [
            client.create_lora_training_client(server.base_model, rank=RANK, seed=seed).result()
            for seed, client in enumerate(clients)
        ]

        def all_done(trainer) -> float:
            """Seconds until all requests of one client, sent at once, are answered."""
            start = time.perf_counter()
            futures = [trainer.forward_backward([datum(SMALL, seed)], "cross_entropy") for seed in range(REQUESTS)]
            for future in futures:
                assert len(future.result().loss_fn_outputs) == 1
            return time.perf_counter() - start

        def all_at_once() -> list[float]:
            times: list[float] = []
            threads = [Thread(target=lambda trainer=trainer: times.append(all_done(trainer))) for trainer in trainers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(times) == CLIENTS, "a request has failed; see above"
            return times

        all_at_once()
        alone = statistics.median(all_done(trainers[0]) for _ in range(3))
        times = [time for _ in range(3) for time in all_at_once()]
    report(benchmark="fairness, crowd", case=f"1 client x {REQUESTS} requests", seconds=round(alone, 2))
    report(
        benchmark="fairness, crowd",
        case=f"{CLIENTS} clients x {REQUESTS} requests at once, three times",
        seconds=round(statistics.median(times), 2),
        fastest_s=round(min(times), 2),
        slowest_s=round(max(times), 2),
        slowest_over_fastest=round(max(times) / min(times), 2),
        slowest_over_8_alone=round(max(times) / (CLIENTS * alone), 2),
    )


def turns(seconds: float, report: Callable[..., None]) -> None:
    """Measure the engine's turns while one model trains large batches and another one small batches."""
    from skyrl.backends.jax.backend import JaxBackend
    from skyrl.backends.jax.config import JaxBackendConfig
    from skyrl.backends.operations import CreateModel, ForwardBackward, OptimStep
    from skyrl.tx.synthetic.make_model import make_model
    from skyrl.types import AdamParams, Datum, LoraConfig

    draws = np.random.default_rng(0)

    def rows(count: int, length: int) -> list[Datum]:
        data = []
        for _ in range(count):
            ids = draws.integers(0, 256, length + 1).astype(np.int32)
            data.append(Datum(ids[:-1], {"target_tokens": ids[1:], "weights": np.ones(length, np.float32)}))
        return data

    batches = {"heavy": rows(*HEAVY), "small": rows(1, SMALL)}
    with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as scratch:
        folder = make_model(Path(scratch) / "tiny", arch="qwen3", **asdict(model_shapes.TINY), seed=0)
        with closing(JaxBackend(str(folder), JaxBackendConfig())) as backend:
            number = 0

            def submit(name: str) -> None:
                nonlocal number
                number += 1
                who = {"model_id": name, "tenant": name}
                data = batches[name]
                passing = ForwardBackward(request_id=f"{name} {number}", **who, data=data, loss_fn="cross_entropy")
                backend.submit(passing)
                backend.submit(OptimStep(request_id=f"step {number}", **who, adam_params=AdamParams()))

            ran: tuple[str, ...] = ()

            def note(request_ids: tuple[str, ...]) -> None:
                nonlocal ran
                ran = request_ids

            def run(until: float) -> dict[str, list[float]]:
                """Seconds of the turns that trained each batch; turns with both count for the first."""
                times: dict[str, list[float]] = {name: [] for name in batches}
                while time.perf_counter() < until:
                    start = time.perf_counter()
                    completions = backend.step()
                    seconds = time.perf_counter() - start
                    for name in batches:
                        if any(request_id.startswith(name) for request_id in ran):
                            times[name].append(seconds)
                            break
                    for completion in completions:
                        if (name := completion.request_id.split()[0]) in batches:
                            submit(name)
                return times

            backend.on_quantum = note
            for name in batches:
                config = LoraConfig(rank=RANK, seed=0)
                backend.submit(CreateModel(request_id=f"create {name}", model_id=name, tenant=name, lora_config=config))
                submit(name)
            run(time.perf_counter() + seconds)  # compiles
            times = run(time.perf_counter() + seconds)
    for name, data in batches.items():
        quantiles = {f"p{q}_ms": round(1e3 * float(np.percentile(times[name], q)), 1) for q in (50, 99, 100)}
        case = f"turns of {len(data)} x {len(data[0].tokens)} beside the other, in process"
        report(
            benchmark="fairness, turns",
            case=case,
            turns=len(times[name]),
            **quantiles,
        )


def main(repeats: int, seconds: float) -> None:
    report = partial(emit, model="tiny", peak_gflops=round(peak_flops() / 1e9, 1))
    turns(seconds, report)
    with serving("tiny") as (_, server):
        latencies(server, repeats, report)
        crowd(server, report)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30.0, help="of measured turns")
    arguments = parser.parse_args()
    main(arguments.repeats, arguments.seconds)
