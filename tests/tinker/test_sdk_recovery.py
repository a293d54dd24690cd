"""Recovery from a restart of the server, and from the death of its engine. Each test has a server of its own."""

import os
import select
from pathlib import Path

import numpy as np
import pytest
import tinker

from live import engine_pid, new_trainer, sample, sequence, service, step, supervised, wait_for_new_engine
from skyrl.tinker.local_server import LocalServer
from tests.waiting import until

TOKENS = sequence(12)
DATA = [supervised(TOKENS)]


@pytest.fixture
def own_server(tiny_model, tmp_path):
    with LocalServer(tmp_path / "server", str(tiny_model)) as live_server:
        yield live_server


def greedy(client: tinker.ServiceClient, path: str) -> list[int]:
    sampler = client.create_sampling_client(model_path=path).result()
    return sample(sampler, TOKENS[:3], max_tokens=6, temperature=0.0, stop=[]).sequences[0].tokens


@pytest.mark.slow  # `make demo` restarts a server too, and tests/faults stops one
def test_checkpoints_outlive_a_restart(own_server):
    with service(own_server) as client:
        trainer = new_trainer(client, own_server)
        for _ in range(3):
            step(trainer, DATA)
        sampler_path = trainer.save_weights_for_sampler("s").result().path
        state_path = trainer.save_state("t").result().path
        before = greedy(client, sampler_path)
        expected = step(trainer, DATA).metrics["loss:sum"]
    own_server.restart()
    with service(own_server) as client:
        assert greedy(client, sampler_path) == before
        resumed = client.create_training_client_from_state_with_optimizer(state_path).result()
        assert step(resumed, DATA).metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_processes_that_are_asked_show_what_their_threads_are_at_and_go_on(live_server):
    stacks = live_server.stacks()
    assert ("skyrl/tinker/engine/loop.py" in stacks, "skyrl/tinker/api_process.py" in stacks) == (True, True)
    assert live_server.healthy()


def test_an_engine_that_computes_with_jax_has_not_loaded_torch(live_server):
    libraries = Path(f"/proc/{engine_pid(live_server)}/maps").read_text()
    assert ("libjax" in libraries, "libtorch" in libraries) == (True, False)


@pytest.mark.slow
def test_a_killed_engine_is_replaced_and_new_work_is_fine(own_server):
    with service(own_server) as client:
        trainer = new_trainer(client, own_server)
        step(trainer, DATA)
        path = trainer.save_weights_for_sampler("s").result().path
        before = greedy(client, path)
        wait_for_new_engine(own_server, own_server.kill_engine())
        assert greedy(client, path) == before
        step(new_trainer(client, own_server), DATA)


def test_a_trainer_goes_on_after_its_engine_was_killed_as_one_whose_was_not(own_server):
    def losses(trainer: tinker.TrainingClient, steps: int) -> list[float]:
        return [step(trainer, DATA).metrics["loss:sum"] for _ in range(steps)]

    with service(own_server) as client:
        undisturbed = losses(new_trainer(client, own_server), 3)
        trainer = new_trainer(client, own_server)
        before = losses(trainer, 1)
        own_server.kill_engine()
        np.testing.assert_allclose(before + losses(trainer, 2), undisturbed, rtol=1e-5)


def test_the_server_stops_cleanly_on_interrupt(own_server):
    assert own_server.process is not None
    process, engine = own_server.process, os.pidfd_open(engine_pid(own_server))
    own_server.stop()
    assert process.returncode == 0
    until(lambda: select.select([engine], [], [], 0)[0], "the engine has ended")
    os.close(engine)
