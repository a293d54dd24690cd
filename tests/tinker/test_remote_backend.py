"""A server whose models live in other processes, trained through the stock SDK, against a NumPy loop in float64."""

import json
import os
import select
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker

from live import datum, engine_pid, new_trainer, sample, sequence, service, wait_for_new_engine
from skyrl.errors import BackendLost
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.engine import TinkerEngine
from skyrl.tinker.local_server import LocalServer
from skyrl.tinker.processes.channel import ChannelClosed, EngineChannel
from skyrl.tinker.processes.messages import Running
from tests.fakes import KILL
from tests.remote import RemoteBackend
from tests.remote_worker import RemoteConfig
from tests.tinker.engine_bench import Bench, a_pass, a_sample, create
from tests.waiting import BOUND_S, until

pytestmark = pytest.mark.full

VOCAB, RANK, SEED = 12, 3, 5  # below the tokens that break things
SCALING = 32 / RANK
RATE, DECAY, CLIP, BETAS, EPS = 0.02, 0.1, 4.0, (0.8, 0.9), 1e-8
ADAM = tinker.AdamParams(
    learning_rate=RATE, weight_decay=DECAY, grad_clip_norm=CLIP, beta1=BETAS[0], beta2=BETAS[1], eps=EPS
)
DISPATCH_S = 0.1
DEADLINE_S = 5


def data(step: int) -> list[tuple[list[int], np.ndarray]]:
    """Tokens and weights of the sequences of a step."""
    rng = np.random.default_rng(step)
    return [(sequence(6 + n, seed=10 * step + n, vocab=VOCAB), rng.uniform(-0.5, 1.5, 5 + n)) for n in range(4)]


@dataclass
class Step:
    loss: float
    logprobs: list[np.ndarray]
    norm: float


def loop(steps: int) -> tuple[list[Step], np.ndarray]:
    """Return the result of each step, and the final logits of what follows each token; one matrix product at a time."""
    base = np.random.default_rng(0).normal(size=(VOCAB, VOCAB))
    a, b = np.random.default_rng(SEED).normal(size=(VOCAB, RANK)) / np.sqrt(RANK), np.zeros((RANK, VOCAB))
    moments = [[np.zeros_like(x), np.zeros_like(x)] for x in (a, b)]
    returned = []
    for t in range(1, steps + 1):
        slopes, losses, logprobs = np.zeros((VOCAB, VOCAB)), [], []
        for tokens, weights in data(t):
            weights = weights.astype(np.float32).astype(float)
            probabilities = np.exp(base + SCALING * a @ b)
            probabilities /= probabilities.sum(1, keepdims=True)
            own = np.array([np.log(probabilities[x, y]) for x, y in pairwise(tokens)])
            for x, y, weight in zip(tokens, tokens[1:], weights, strict=False):
                slopes[x] += weight * (probabilities[x] - np.eye(VOCAB)[y])
            losses.append(-(weights * own).sum())
            logprobs.append(own)
        gradients = [SCALING * slopes @ b.T, SCALING * a.T @ slopes]
        norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
        for x, gradient, moment in zip((a, b), gradients, moments, strict=True):
            gradient *= min(1, CLIP / (norm + 1e-6))
            for n in range(2):
                moment[n] = BETAS[n] * moment[n] + (1 - BETAS[n]) * gradient ** (n + 1)
            first, second = (moment[n] / (1 - BETAS[n] ** t) for n in range(2))
            x *= 1 - RATE * DECAY
            x -= RATE * first / (np.sqrt(second) + EPS)
        returned.append(Step(float(sum(losses)), logprobs, float(norm)))
    return returned, base + SCALING * a @ b


def submit(trainer: tinker.TrainingClient, number: int):
    """A pass and a step, under way."""
    rows = [datum(tokens, weights=weights) for tokens, weights in data(number)]
    return trainer.forward_backward(rows, "cross_entropy"), trainer.optim_step(ADAM)


def result(under_way) -> Step:
    output, step = (future.result() for future in under_way)
    logprobs = [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]
    return Step(output.metrics["loss:sum"], logprobs, step.metrics["skyrl.ai/grad_norm"])


def worker(server: LocalServer) -> int:
    """The process id of the trainer's."""
    workers = psutil.Process(engine_pid(server)).children()
    [trainer] = [worker for worker in workers if worker.cmdline()[-1].endswith("# trainer")]
    return trainer.pid


@dataclass
class Run:
    """Observations of a training run whose server had some accidents."""

    steps: list[Step]
    drawn: tinker.SampledSequence
    log: str
    lost: dict[str, int]
    """Process ids of workers, which have all ended, by what happened to them."""
    snapshots: list[Path]
    """Those that were there when the server had stopped in the middle of a pass."""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder, lost = tmp_path_factory.mktemp("remote"), {}
    hold = folder / "hold"
    config = {"vocab_size": VOCAB, "ranks": 2, "rows": 1, "dispatch_s": DISPATCH_S, "in_flight": 2}
    config |= {"deadline_s": DEADLINE_S, "hold": str(hold)}
    chosen = {"backend": "tests.remote:RemoteBackend", "backend-config": json.dumps(config)}
    with LocalServer(folder, "bigram", chosen) as server, service(server) as client:
        trainer = new_trainer(client, server, rank=RANK, seed=SEED)

        def in_mid_pass(number: int, accident: Callable[[], None]) -> Step:
            hold.mkdir()
            under_way = submit(trainer, number)
            until((hold / "begun").exists, "the first of two dispatches has begun")
            accident()
            return result(under_way)

        def go_on() -> None:
            hold.rename(folder / f"held-{len(list(folder.glob('held-*')))}")

        def end(how: signal.Signals) -> None:
            engine, lost[how.name] = engine_pid(server), worker(server)
            handle = os.pidfd_open(lost[how.name])
            os.kill(lost[how.name], how)
            go_on()
            wait_for_new_engine(server, engine)
            until(lambda: select.select([handle], [], [], 0)[0], "the worker has ended")
            os.close(handle)

        def restart() -> None:
            logged = server.log_path.stat().st_size
            with ThreadPoolExecutor(1) as own:
                stopped = own.submit(server.stop)
                until(lambda: b"stopping" in server.log_path.read_bytes()[logged:], "the server is stopping")
                go_on()
                stopped.result()
            snapshots.extend(folder.glob("checkpoints/*/snapshots/*/manifest.json"))
            server.start()

        snapshots: list[Path] = []
        steps = [result(submit(trainer, 1))]
        steps += [in_mid_pass(2, lambda: end(signal.SIGKILL)), result(submit(trainer, 3))]
        steps += [in_mid_pass(4, lambda: end(signal.SIGSTOP)), in_mid_pass(5, restart), result(submit(trainer, 6))]
        sampler = trainer.save_weights_and_get_sampling_client().result()
        (drawn,) = sample(sampler, [3, 1], max_tokens=6, temperature=0.0, stop=[]).sequences
        return Run(steps, drawn, server.log_path.read_text(), lost, snapshots)


def test_the_stock_sdk_trains_what_a_loop_computes_whatever_happens_to_workers_and_server(run):
    expected, _ = loop(6)
    np.testing.assert_allclose([step.loss for step in run.steps], [step.loss for step in expected], rtol=1e-5)
    np.testing.assert_allclose([step.norm for step in run.steps], [step.norm for step in expected], rtol=1e-5)
    for one, other in zip(run.steps, expected, strict=True):
        for own, its in zip(one.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(own, its, rtol=1e-5, atol=1e-5)


def test_samples_are_of_what_was_learned(run):
    _, logits = loop(6)
    tokens = [1, *run.drawn.tokens]
    assert run.drawn.tokens == [logits[token].argmax() for token in tokens[:-1]]
    rows = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(run.drawn.logprobs, [rows[x, y] for x, y in pairwise(tokens)], 1e-5)


def test_a_worker_that_is_killed_ends_its_engine_with_the_cause(run):
    assert f"the backend is lost: the trainer (process {run.lost['SIGKILL']}) was killed by SIGKILL" in run.log


def test_a_worker_that_hangs_ends_its_engine_at_the_deadline_and_goes_with_it(run):
    """That it goes is waited for by `run`."""
    assert f"the backend is lost: a dispatch has not ended within deadline_s={DEADLINE_S}" in run.log
    assert "SIGSTOP" in run.lost


def test_a_server_that_stops_in_mid_pass_leaves_a_snapshot_of_the_step_before(run):
    assert len(run.snapshots) == 1


def test_an_engine_says_what_its_lost_worker_was_at_and_not_what_else_was_under_way(tmp_path):
    config = EngineConfig(checkpoints_base=tmp_path / "checkpoints", gap_timeout_s=60)
    ours, its = socket.socketpair()
    ours.settimeout(BOUND_S)
    channel, api = EngineChannel(its), EngineChannel(ours)
    # Nobody reads what the engine says until it has ended: tokens that come faster could fill the channel before that.
    backend = RemoteBackend("bigram", RemoteConfig(ranks=1, in_flight=2, token_s=1.0))
    sampled = a_sample(max_tokens=1000)
    killer, other = (a_pass(token, model_id) for token, model_id in ((KILL, "m"), (1, "n")))
    for operations in ([create("m"), killer], [create("n"), other]):
        for frame in Bench.enqueued(*operations):
            channel.deliver(frame)
    channel.deliver(sampled)
    with pytest.raises(BackendLost):
        TinkerEngine(backend, channel, config).run()
    backend.close()
    channel.close()
    running = []
    with pytest.raises(ChannelClosed):
        while True:
            if isinstance(frame := api.receive(), Running):
                running.append(set(frame.request_ids))
    api.close()
    assert {killer.request_id, sampled.operation.request_id} <= running[-2]
    assert running[-1] == {killer.request_id}
