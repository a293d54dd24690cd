"""A backend all of whose work waits for a disk: it does nothing until that answers, and then goes on at once."""

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import driver
from skyrl.backends.backend import ForwardBackward, Operation, Publish
from skyrl.backends.common.background_writer import THREADS
from skyrl.backends.common.offload import MemoryBudget
from skyrl.backends.common.versions import READ_AT_ONCE
from skyrl.backends.executor import Executor
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.types import ErrorResponse, ForwardBackwardOutput, Result, SampleOutput, SaveOutput
from tests.backends.clock import sleeps
from tests.waiting import BOUND_S

pytestmark = pytest.mark.gpu

STEPS = 4
"""That may find nothing to do, until that is known."""


@pytest.fixture(scope="module")
def shared(tiny_model) -> Iterator[JaxBackend]:
    backend = JaxBackend(str(tiny_model), JaxBackendConfig(compilation_cache=False, warm_up=False))
    yield backend
    backend.close()


@pytest.fixture
def backend(shared) -> Iterator[JaxBackend]:
    budget, storage = shared._models.budget, shared._storage
    driver.clear(shared)
    driver.create(shared)
    yield shared
    shared._models.budget, shared._storage = budget, storage


@contextmanager
def held(submit, threads: int = 1) -> Iterator[threading.Event]:
    """Threads that stand at the event, and do nothing else until it is set."""
    gate, standing = threading.Event(), threading.Semaphore(0)

    def stand() -> None:
        standing.release()
        gate.wait()

    for number in range(threads):
        submit(number, stand)
    for _ in range(threads):
        assert standing.acquire(timeout=BOUND_S)
    try:
        yield gate
    finally:
        gate.set()


def rest(backend: Executor, seconds: float = 0.4) -> dict[str, Result]:
    """Results of what ends at once. Then there is nothing to do for so many seconds, and nobody looks."""
    results, steps, looks = {}, 0, []
    while backend.wait(0) and steps <= STEPS:
        steps += 1
        results |= {completion.request_id: completion.result for completion in backend.step()}
    assert steps <= STEPS
    backend.on_wake = lambda: looks.append(None)
    slept = sleeps(backend, seconds)
    backend.on_wake = lambda: None
    assert slept <= 2 and not looks
    return results


def rested(backend: Executor, gate: threading.Event, *operations: Operation) -> list[Result]:
    """Results of operations that wait until the gate is opened."""
    for operation in operations:
        backend.submit(operation)
    results = rest(backend)
    assert len(results) < len(operations)
    gate.set()
    while len(results) < len(operations):
        assert backend.wait(BOUND_S), "nobody said that it goes on"
        results |= {completion.request_id: completion.result for completion in backend.step()}
    return [results[operation.request_id] for operation in operations]


@pytest.mark.full
def test_samples_whose_versions_are_being_read(backend, tmp_path):
    saved = [tmp_path / str(number) for number in range(READ_AT_ONCE + 3)]
    for path in saved:
        driver.save(backend, path)
    with held(lambda number, wait: backend._writer.read(f"slow{number}", wait), THREADS) as gate:
        samples = [driver.sampling(f"new {path}", path, max_tokens=1) for path in saved]
        assert all(isinstance(result, SampleOutput) for result in rested(backend, gate, *samples))


@pytest.mark.full
def test_a_sample_that_waits_for_a_reading_goes_on_when_another_one_is_not_wanted_any_more(backend, tmp_path):
    driver.save(backend, tmp_path / "saved")
    with held(lambda number, wait: backend._writer.read(f"slow{number}", wait), THREADS):
        samples = [driver.sampling(f"v{number}", tmp_path / "saved", max_tokens=1) for number in range(READ_AT_ONCE)]
        for sample in samples:
            backend.submit(sample)
        backend.submit(driver.sampling("last", tmp_path / "missing", max_tokens=1))
        rest(backend)
        for sample in samples:
            backend.cancel(sample.request_id)
        rest(backend)
        backend.drop_version(samples[0].version)
        assert backend.wait(BOUND_S)
        backend.step()
        assert "last" in backend._versions._readings
    completions = []
    while not completions:
        assert backend.wait(BOUND_S)
        completions = backend.step()
    assert isinstance(completions[0].result, ErrorResponse)


def test_a_publication_that_waits_until_others_are_written(backend, tmp_path):
    backend._storage = dataclasses.replace(backend._storage, unwritten_bytes=1)
    paths = [str(tmp_path / f"v{number}") for number in range(3)]
    with held(lambda number, wait: backend._writer.submit("model", "slow", wait)) as gate:
        publishing = [Publish(request_id=path, model_id="model", version=path, path=path) for path in paths]
        assert all(isinstance(result, SaveOutput) for result in rested(backend, gate, *publishing))


@pytest.mark.full
def test_a_pass_of_a_model_that_stands_in_line_for_the_device(backend):
    models = backend._models
    models.budget = MemoryBudget(models.used_bytes("device"), 2**40)
    driver.create(backend, "other")
    with held(lambda number, wait: models._thread.submit(wait)) as gate:
        data = [driver.random_datum(8)]
        (result,) = rested(
            backend, gate, ForwardBackward(request_id="pass", model_id="model", data=data, loss_fn="cross_entropy")
        )
    assert isinstance(result, ForwardBackwardOutput)
