"""A request that kills every engine that works on it: it fails alone, and nobody else learns of it.

Real processes with the fake backend, in which the token `KILL` ends the engine with SIGKILL; the stock SDK.
"""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tinker

from fakes import KILL
from live import ADAM, datum, new_trainer, sample, service, step, text
from skyrl.tinker.local_server import LocalServer
from tests.faults.clients import of_pass, of_sequence
from tests.faults.diary import differences

CRASHES = 3
"""Engines that a request may take with it, one after the other, of which it is alone."""
ROUNDS = 12


@dataclass
class Seen:
    """Outcomes of a served request, and of its neighbours."""

    neighbours: list[Any]
    own: Any
    engines_lost: int
    folder: Path


def neighbour(server: LocalServer, seed: int) -> list[Any]:
    """Return the observations of a tenant that trains and samples."""
    seen: list[Any] = []
    with service(server) as client:
        trainer = new_trainer(client, server, seed=seed)
        for n in range(ROUNDS):
            seen.append(of_pass(step(trainer, [datum([100 + n, 200 + seed, 3])])))
            sampler = trainer.save_weights_and_get_sampling_client().result()
            response = sample(sampler, [100 + n, 5], num_samples=2, max_tokens=5, seed=n, stop=[])
            seen.append([of_sequence(one) for one in response.sequences])
    return seen


def with_neighbours(folder: Path, use: Callable[[LocalServer], Any]) -> Seen:
    """Serve two neighbours and `use` at the same time."""
    options = {"backend": "tests.fakes:FakeBackend", "snapshot-every-steps": "3"}
    with LocalServer(folder, "fake/model", options) as server, ThreadPoolExecutor(3) as pool:
        neighbours = [pool.submit(neighbour, server, seed) for seed in (1, 2)]
        own = pool.submit(use, server)
        seen = [future.result() for future in neighbours], own.result()
        return Seen(
            *seen, len(re.findall(r"engine was killed by SIGKILL.*restarting", server.log_path.read_text())), folder
        )


def failure(future: Any) -> tinker.RequestFailedError:
    with pytest.raises(tinker.RequestFailedError) as caught:
        future.result()
    return caught.value


def poisoned_pass(server: LocalServer) -> list[Any]:
    """A model whose second pass kills the engine: how that fails, what the step after it says, and how it goes on."""
    with service(server) as client:
        trainer = new_trainer(client, server, seed=3)
        step(trainer, [datum([1, 2, 3])])
        killer = trainer.forward_backward([datum([1, KILL, 3])], "cross_entropy")
        failed, unstepped = failure(killer), failure(trainer.optim_step(ADAM))
        return [failed, unstepped, of_pass(step(trainer, [datum([1, 2, 3])]))]


def healthy_passes(server: LocalServer) -> Any:
    """Return what the model of `poisoned_pass` would have seen without the pass that kills."""
    with service(server) as client:
        trainer = new_trainer(client, server, seed=3)
        step(trainer, [datum([1, 2, 3])])
        return of_pass(step(trainer, [datum([1, 2, 3])]))


def poisoned_sample(server: LocalServer) -> tinker.RequestFailedError:
    with service(server) as client:
        sampler = client.create_sampling_client(base_model=server.base_model).result()
        return failure(sampler.sample(text([1, KILL]), 1, tinker.SamplingParams(max_tokens=2)))


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return with_neighbours(tmp_path_factory.mktemp("clean"), healthy_passes)


@pytest.fixture(scope="module")
def after_pass(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return with_neighbours(tmp_path_factory.mktemp("pass"), poisoned_pass)


@pytest.fixture(scope="module")
def after_sample(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return with_neighbours(tmp_path_factory.mktemp("sample"), poisoned_sample)


@pytest.mark.full
def test_a_pass_that_kills_the_engine_fails_after_three_crashes_alone(after_pass):
    failed, *_ = after_pass.own
    assert CRASHES <= after_pass.engines_lost <= CRASHES + 1  # the first beside its neighbours, maybe
    assert failed.category == tinker.types.RequestErrorCategory.Server
    assert re.search(rf"request forward_backward-\S+ .* the last {CRASHES} of them alone", str(failed))


def test_the_step_after_a_pass_that_kills_fails_and_the_model_goes_on(after_pass, clean):
    _, unstepped, after = after_pass.own
    assert "incomplete" in str(unstepped)
    assert not differences(after, clean.own, tolerance=0)


def test_neighbours_of_a_pass_that_kills_see_what_they_would_see_without_it(after_pass, clean):
    assert not differences(after_pass.neighbours, clean.neighbours, tolerance=0)


@pytest.mark.full
def test_a_sample_that_kills_the_engine_fails_after_three_crashes_alone(after_sample):
    assert CRASHES <= after_sample.engines_lost <= CRASHES + 2
    assert after_sample.own.category == tinker.types.RequestErrorCategory.Server
    assert re.search(rf"request sample-\S+ .* the last {CRASHES} of them alone", str(after_sample.own))


@pytest.mark.full
def test_neighbours_of_a_sample_that_kills_see_what_they_would_see_without_it(after_sample, clean):
    assert not differences(after_sample.neighbours, clean.neighbours, tolerance=0)
