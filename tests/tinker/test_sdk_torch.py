"""The torch backend behind a server, through the stock SDK: architectures, several tenants, workers that die."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker

import oracle
from live import ADAM, GREEDY, adapter_folder, datum, engine_pid, new_trainer, sample, service, wait_for_new_engine
from skyrl.tinker.local_server import LocalServer
from tests.backends.torch_models import VOCAB, make_model
from tests.live import make_tiny_model
from tests.rays import actors, ray_cluster

RNG = np.random.default_rng(0)
ROWS = [RNG.integers(0, VOCAB, n).tolist() for n in (12, 30, 7, 45)]
LIMIT_S = 4
CAUSES = {"processes": ("was killed by SIGKILL", f"deadline_s={LIMIT_S}"), "ray": ("worker process has died",)}


def batch() -> list[tinker.Datum]:
    return [datum(row, weights=np.ones(len(row) - 1)) for row in ROWS]


def served(folder: Path, model: Path, **config) -> LocalServer:
    sizes = {"max_lora_rank": 8, "max_context_length": 128, "train_tile_tokens": 64}
    options = {"backend": "skyrl_train", "backend-config": json.dumps(sizes | config)}
    return LocalServer(folder, str(model), options)


def steps(trainer: tinker.TrainingClient, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        under_way = trainer.forward_backward(batch(), "cross_entropy"), trainer.optim_step(ADAM)
        losses.append(under_way[0].result().metrics["loss:sum"])
        under_way[1].result()
    return losses


@pytest.mark.full
@pytest.mark.gate("gpt_neox")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("kind", ["gpt_neox", "phi", "olmo2", "llama", "qwen2", "gemma3_text"])
def test_an_architecture_is_trained_sampled_and_exported_as_transformers_and_peft_have_it(tmp_path, kind):
    model = make_model(tmp_path / "model", kind)
    with served(tmp_path / "state", model) as server, service(server) as client:
        trainer = new_trainer(client, server, rank=8)
        check_logprobs(trainer, oracle.load(model))
        losses = steps(trainer, 12)
        assert losses[-1] < 0.7 * losses[0]
        path = trainer.save_weights_for_sampler("trained").result().path
        peft = oracle.load(model, adapter_folder(server, path))
        check_logprobs(trainer, peft)
        sampler = client.create_sampling_client(model_path=path).result()
        scores = sampler.compute_logprobs(tinker.ModelInput.from_ints(ROWS[1])).result()
        wanted = oracle.logprobs(peft, ROWS[1]).detach().numpy()
        np.testing.assert_allclose(scores[1:], wanted, rtol=0, atol=2e-4)
        (drawn,) = sample(sampler, ROWS[1][:20], max_tokens=3, stop=[], **GREEDY).sequences
        assert drawn.tokens == oracle.penalised_greedy(peft, ROWS[1][:20], 3)


def check_logprobs(trainer: tinker.TrainingClient, reference) -> None:
    """Those of a trainer are those of a model of transformers."""
    output = trainer.forward(batch(), "cross_entropy").result()
    for row, one in zip(ROWS, output.loss_fn_outputs, strict=True):
        wanted = oracle.logprobs(reference, row).detach().numpy()
        np.testing.assert_allclose(one["logprobs"].to_numpy(), wanted, rtol=0, atol=2e-4)


@dataclass
class Run:
    losses: list[float]
    others: list[float]
    """Of a second tenant, with another rank."""
    tokens: list[int]
    log: str
    workers: str
    left: list[int]
    """Workers that were there when the server had ended."""


def workers(server: LocalServer) -> list[psutil.Process]:
    """Processes below the engine, and actors of a cluster of the tests."""
    own = psutil.Process(engine_pid(server)).children()
    return [child for child in own if "torch.workers.processes" in " ".join(child.cmdline())] or actors()


def train(folder: Path, model: Path, accidents: tuple[signal.Signals, ...] = (), **config) -> Run:
    with served(folder, model, **config) as server, service(server) as client, service(server) as other:
        first, second = new_trainer(client, server, rank=8), new_trainer(other, server, rank=4, seed=1)
        losses, others = steps(first, 2), steps(second, 2)
        for how in accidents:
            engine, victim = engine_pid(server), workers(server)[-1]
            under_way = first.forward_backward(batch(), "cross_entropy")
            os.kill(victim.pid, how)
            after = first.optim_step(ADAM)
            wait_for_new_engine(server, engine)
            losses.append(under_way.result().metrics["loss:sum"])
            after.result()
        losses += steps(first, 5 - len(accidents))
        others += steps(second, 2)
        sampler = first.save_weights_and_get_sampling_client().result()
        (drawn,) = sample(sampler, ROWS[0], max_tokens=8, stop=[], **GREEDY).sequences
        there = workers(server)
        log = server.log_path
    left = [process.pid for process in psutil.wait_procs(there, timeout=30)[1]]
    return Run(losses, others, drawn.tokens, log.read_text(), config.get("workers", ""), left)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> Run:
    """One worker in the engine's process."""
    return train(tmp_path_factory.mktemp("alone"), model)


@pytest.fixture(scope="module", params=["processes", pytest.param("ray", marks=pytest.mark.slow)])
def troubled(request, model, tmp_path_factory) -> Run:
    """Two workers, of which one is killed, and as a process stopped after that."""
    apart = {"workers": request.param, "num_workers": 2, "dispatch_timeout_s": LIMIT_S}
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "processes":
        return train(folder, model, (signal.SIGKILL, signal.SIGSTOP), **apart)
    with ray_cluster({}) as address:
        return train(folder, model, (signal.SIGKILL,), **apart, ray_address=address)


@pytest.mark.full
def test_two_workers_of_which_one_dies_and_one_hangs_train_as_one_that_lives(troubled, alone):
    np.testing.assert_allclose(troubled.losses, alone.losses, rtol=1e-4)
    assert troubled.tokens == alone.tokens


@pytest.mark.full
def test_the_log_says_which_worker_and_why(troubled):
    assert "worker of rank 1" in troubled.log
    for cause in CAUSES[troubled.workers]:
        assert cause in troubled.log


@pytest.mark.full
def test_no_worker_is_left(troubled):
    assert troubled.left == []
