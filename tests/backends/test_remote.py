"""Compute in other processes: what the executor does meanwhile, and what becomes of it when they die or hang."""

import asyncio
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from skyrl.backends.async_client import BackendClient
from skyrl.backends.backend import Completion, ForwardBackward, Operation, Progress, Sample
from skyrl.backends.executor.work_queue import Quantum, WorkQueue
from skyrl.errors import BackendLost
from skyrl.types import ErrorResponse, ForwardBackwardOutput, LoraConfig, SampleOutput, SamplingParams, SaveOutput
from tests import waiting
from tests.backends.clock import Clock, sleeps
from tests.conformance.operations import (
    a_pass,
    a_revival,
    a_sample,
    a_snapshot,
    a_step,
    done,
    ends,
    logprobs,
    run,
    snapshot,
    state,
)
from tests.fakes import HANG, KILL, POISON
from tests.remote import Remote, RemoteBackend
from tests.remote_worker import TILE, RemoteConfig
from tests.waiting import BOUND_S


class Watched(RemoteBackend):
    """Keeps the models of each dispatch's tiles."""

    def __init__(self, config: RemoteConfig):
        super().__init__("remote", config)
        self.dispatched: list[list[str]] = []

    def compute(self, quanta: list[Quantum]):
        names = {handle: model_id for model_id, handle in self.models.items()}
        if quanta[0].kind == TILE:
            self.dispatched.append([names[quantum.inputs[1]] for quantum in quanta])
        return super().compute(quanta)


@pytest.fixture(scope="module")
def survivors() -> Iterator[list[Watched]]:
    """The backend that the next test can have, as its workers live and have nothing to do."""
    backends: list[Watched] = []
    yield backends
    for backend in backends:
        backend.close()


@pytest.fixture
def open_remote(survivors) -> Iterator[Callable[..., Watched]]:
    """Opens a backend with model "a"."""
    opened: list[Watched] = []

    def open_it(**options) -> Watched:
        config = RemoteConfig(**options)
        opened.append(backend := survivors.pop() if survivors else Watched(config))
        backend.configure(config)
        backend._work_queue = WorkQueue(backend)  # of the real clock
        backend.in_place = False
        backend.dispatched.clear()
        for model_id in list(backend.models):
            backend.delete_model(model_id)
        backend.create_model("a", LoraConfig(rank=4, seed=7))
        return backend

    yield open_it
    for backend in opened:
        ended = [worker.process.poll() for worker in (backend.training, backend.sampling)]
        if ended == [None, None] and not backend.computed:
            survivors.append(backend)
        else:
            backend.close()


def until(backend: RemoteBackend, *operations: Operation) -> list[Completion]:
    """Submit them, and step whenever there is something to do until all have ended, or the backend is lost."""
    for operation in operations:
        backend.submit(operation)
    ended: list[Completion] = []
    while not {operation.request_id for operation in operations} <= {one.request_id for one in ended}:
        assert backend.wait(BOUND_S)
        ended += backend.step()
    return ended


@contextmanager
def held(worker: Remote) -> Iterator[threading.Semaphore]:
    """Let through as many messages of a worker as the test releases; all of them afterwards."""
    worker.gate = threading.Semaphore(0)
    try:
        yield worker.gate
    finally:
        worker.open_gate()


def paced(
    backend: RemoteBackend, clock: Clock, seconds: float, gate: threading.Semaphore, *operations: Operation
) -> list[Completion]:
    """Submit them, and step until all have ended. Each dispatch takes so many seconds of the clock."""
    for operation in operations:
        backend.submit(operation)
    ended: list[Completion] = []
    while len(ended) < len(operations):
        while backend.wait(0):
            ended += backend.step()
        if len(ended) < len(operations):
            clock.now += seconds
            gate.release()
            assert backend.wait(BOUND_S)
    return ended


def rows(model_id: str, *tokens: list[int], **options) -> ForwardBackward:
    """A pass of these sequences; its model is a tenant of its own."""
    operation = a_pass(model_id, *(np.asarray(own, np.int32) for own in tokens))
    return ForwardBackward(**{**vars(operation), "tenant": model_id, **options})


def breaking(token: int, model_id: str = "a") -> ForwardBackward:
    return rows(model_id, [1, token, 2])


def a_breaking_sample(token: int) -> Sample:
    params = SamplingParams(max_tokens=2, seed=1, stop=[])
    return Sample(request_id=f"breaks on {token}", version=None, prompt=np.asarray([token]), params=params)


# -- meanwhile ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("in_flight", [1, 2])
def test_while_a_dispatch_is_in_flight_samples_are_served_and_cancelled_and_the_driver_rests(open_remote, in_flight):
    backend = open_remote(token_s=0.05, in_flight=in_flight, deadline_s=2 * BOUND_S)
    training, cancelled = a_pass("a"), a_sample(None, max_tokens=1000)
    samples = [a_sample(None, seed=seed) for seed in range(3)]
    operations, ended, steps = (training, *samples, cancelled), list[str](), 0
    wakes: list[None] = []
    backend.on_wake = lambda: wakes.append(None)
    with held(backend.training):
        for operation in operations:
            backend.submit(operation)
        while set(backend.computed) != {training.request_id, cancelled.request_id}:
            assert backend.wait(BOUND_S)
            ended += [completion.request_id for completion in backend.step()]
            steps += 1
        assert steps <= len(wakes) + len(operations), "it looked although nobody had said anything"
        backend.cancel(cancelled.request_id)
        backend.sampling.ask().result(BOUND_S)  # it has stopped, and all that it drew before is here
        while backend.wait(0):
            assert backend.step() == []
        assert sleeps(backend, 0.3) <= 2
    backend.on_wake = lambda: None
    assert sorted(ended) == sorted(sample.request_id for sample in samples)
    (result,) = ends(backend, training)
    assert isinstance(result, ForwardBackwardOutput)


def test_operations_of_others_that_compute_nothing_end_while_a_dispatch_is_in_flight(open_remote):
    backend = open_remote(dispatch_s=30)
    backend.submit(training := a_pass("a"))
    backend.step()
    backend.create_model("b", LoraConfig(rank=2, seed=1))
    backend.delete_model("b")
    assert backend.computed == (training.request_id,)


@pytest.mark.full
def test_nobody_looks_while_an_operation_waits_for_a_file(open_remote, tmp_path):
    backend, reading = open_remote(), threading.Event()
    saved = snapshot(backend, "a", tmp_path / "saved")
    blocking = backend._writer.submit("a", saved.path, lambda: reading.wait(BOUND_S))  # what is read comes after it
    backend.submit(revival := a_revival("a", saved))
    for _ in range(10):
        if backend.wait(0):
            backend.step()
    looks: list[None] = []
    backend.on_wake = lambda: looks.append(None)
    try:
        assert not backend.wait(0.3) and not looks
    finally:
        reading.set()
    assert backend.wait(BOUND_S) and blocking.result()
    (completion,) = backend.step()
    waiting.until(lambda: looks, "somebody says that the file has been read")
    assert completion.request_id == revival.request_id and len(looks) == 1
    backend.on_wake = lambda: None


def test_dispatches_and_samples_have_bounds_of_their_own(open_remote):
    backend = open_remote(in_flight=1, samples=2, ranks=1)
    backend.create_model("b", LoraConfig(rank=4, seed=7))
    passes, samples = [a_pass("a"), a_pass("b")], [a_sample(None, max_tokens=5) for _ in range(5)]
    seen = set()

    def finish(operations: list, release: Callable[[], None] = lambda: None) -> None:
        left = {operation.request_id for operation in operations}
        while left:
            release()
            assert backend.wait(BOUND_S)
            left -= {completion.request_id for completion in backend.step()}
            seen.add((len(backend.computed) - len(backend.sampler.elsewhere), len(backend.sampler.elsewhere)))

    with held(backend.training), held(backend.sampling) as gate:
        for operation in (*passes, *samples):
            backend.submit(operation)
        while backend.wait(0):
            backend.step()
        finish(samples, gate.release)  # message by message, so that no two samples end in one step
    finish(passes)
    assert max(seen) == (1, 2), "one dispatch and two samples at a time, whatever there is of the others"
    assert {samples for _, samples in seen} == {0, 1, 2}


def test_tokens_of_a_sample_are_told_one_by_one_as_they_come(open_remote):
    backend = open_remote()
    told: list[Progress] = []
    backend.on_progress = told.append
    sample = dataclasses.replace(a_sample(None, max_tokens=20, num_samples=2), reports_progress=True)
    with held(backend.sampling) as gate:
        backend.submit(sample)
        for number in range(1, 41):
            gate.release()
            assert backend.wait(BOUND_S) and backend.step() == [] and len(told) == number
    (result,) = ends(backend, sample)
    assert isinstance(result, SampleOutput)
    for number, sequence in enumerate(result.sequences):
        own = [progress for progress in told if progress.number == number]
        assert {progress.request_id for progress in own} == {sample.request_id} and len(own) == 20
        np.testing.assert_array_equal(np.concatenate([progress.tokens for progress in own]), sequence.tokens)
        np.testing.assert_allclose(np.concatenate([progress.logprobs for progress in own]), sequence.logprobs, 1e-6)


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_a_dispatch_of_four_ranks_takes_tiles_of_three_tenants_and_four_of_one_that_is_alone(open_remote):
    backend = open_remote(ranks=4, rows=1)
    for name in "bc":
        backend.create_model(name, LoraConfig(rank=4, seed=7))
    together = {"a": [[1, 2, 3], [4, 5]], "b": [[5, 6]], "c": [[7, 8]]}
    done(backend, *(rows(name, *tokens) for name, tokens in together.items()))
    assert [sorted(tiles) for tiles in backend.dispatched] == [["a", "a", "b", "c"]]
    backend.dispatched.clear()
    done(backend, rows("a", *[[1, 2]] * 6))
    assert backend.dispatched == [["a"] * 4, ["a"] * 2]


def test_gradients_do_not_depend_on_what_is_computed_beside_them(open_remote, tmp_path):
    backend = open_remote(ranks=4, rows=1, in_flight=2)
    data = [[1, 2, 3], [4, 5], [6, 7, 8], [9, 10], [11, 12]]
    for name in ("alone", "b", "c"):
        backend.create_model(name, LoraConfig(rank=4, seed=7))
    done(backend, rows("alone", *data))
    done(backend, *(rows(name, *data) for name in "bc"))
    assert len({state(backend, name, tmp_path) for name in ("alone", "b", "c")}) == 1


def test_what_cannot_be_computed_with_others_is_retried_and_fails_alone(open_remote):
    backend = open_remote(ranks=4, in_flight=2)
    backend.create_model("b", LoraConfig(rank=4, seed=7))
    good, bad = run(backend, rows("a", [1, 2]), breaking(POISON, "b"))
    assert isinstance(good, ForwardBackwardOutput)
    assert isinstance(bad, ErrorResponse) and bad.gradients == "incomplete" and "internal error" in bad.error


# -- what is abandoned -------------------------------------------------------------------------------------------------


def test_a_snapshot_after_what_was_abandoned_in_flight_waits_for_it_without_being_late(open_remote, tmp_path):
    backend = open_remote(deadline_s=10, in_flight=2, ranks=1, rows=1)
    backend._work_queue = WorkQueue(backend, clock=(clock := Clock()))
    done(backend, a_pass("a"))
    before = state(backend, "a", tmp_path)
    with held(backend.training) as gate:
        backend.submit(training := rows("a", *[[1, 2]] * 4))
        while len(backend.dispatched) < 3:  # the first was of the pass before
            backend.step()
        assert backend.abandon() == [training] and not backend.computed
        (after,) = paced(backend, clock, 9, gate, a_snapshot("a", tmp_path / "after"))
    assert isinstance(after.result, SaveOutput) and after.result.digest == before


def test_a_step_that_is_abandoned_in_flight_has_not_been_made(open_remote, tmp_path):
    backend = open_remote(dispatch_s=0.2)
    done(backend, a_pass("a"))
    before = state(backend, "a", tmp_path)
    backend.submit(a_step("a"))
    backend.step()
    assert len(backend.computed) == 1 and len(backend.abandon()) == 1
    assert state(backend, "a", tmp_path) == before


def test_a_model_whose_pass_was_abandoned_where_sums_are_changed_in_place_is_void_until_it_is_loaded(
    open_remote, tmp_path
):
    backend = open_remote()
    saved = snapshot(backend, "a", tmp_path / "saved")
    backend.in_place = True
    backend.create_model("b", LoraConfig(rank=4, seed=7))
    backend.submit(a_pass("a"))
    backend.step()
    backend.abandon()
    after, other = run(backend, a_snapshot("a", tmp_path / "after"), a_snapshot("b", tmp_path / "other"))
    assert isinstance(after, ErrorResponse) and "model_id=a has an interrupted operation" in after.error
    assert isinstance(other, SaveOutput)
    done(backend, a_revival("a", saved))
    assert state(backend, "a", tmp_path) == saved.digest


def test_a_backend_is_closed_while_a_dispatch_hangs(open_remote):
    backend = open_remote()
    backend.submit(breaking(HANG))
    backend.step()
    backend.close()
    assert backend.abandon() and not backend.busy and backend.step() == []


# -- lost --------------------------------------------------------------------------------------------------------------


def lost(backend: RemoteBackend, *operations: Operation) -> BackendLost:
    with pytest.raises(BackendLost) as caught:
        until(backend, *operations)
    return caught.value


@pytest.mark.full
def test_a_worker_that_is_killed_in_mid_dispatch_loses_the_backend_by_name(open_remote):
    backend = open_remote(in_flight=2)
    backend.create_model("b", LoraConfig(rank=4, seed=7))
    killer = breaking(KILL)
    error = lost(backend, killer, a_step("b"), a_sample(None, max_tokens=500))
    assert str(error) == f"the trainer (process {backend.training.process.pid}) was killed by SIGKILL"
    assert error.request_ids == (killer.request_id,)


@pytest.mark.full
def test_a_worker_that_is_killed_with_nothing_to_do_loses_the_backend_at_once(open_remote):
    backend = open_remote()
    os.kill(backend.training.process.pid, signal.SIGKILL)
    assert backend.wait(BOUND_S)
    with pytest.raises(BackendLost, match=r"the trainer .* was killed by SIGKILL") as caught:
        backend.step()
    assert caught.value.request_ids == ()


@pytest.mark.full
def test_a_sample_that_kills_its_worker_is_blamed_and_no_dispatch_in_flight(open_remote):
    backend = open_remote()
    killer = a_breaking_sample(KILL)
    error = lost(backend, breaking(HANG), killer)
    assert "the sampler" in str(error) and error.request_ids == (killer.request_id,)


def test_a_dispatch_that_hangs_loses_the_backend_at_its_deadline(open_remote):
    backend = open_remote(deadline_s=0.4)
    hanging, began = breaking(HANG), time.monotonic()
    error = lost(backend, hanging)
    assert time.monotonic() - began >= 0.4
    assert "deadline_s=0.4" in str(error) and error.request_ids == (hanging.request_id,)


@pytest.mark.full
def test_a_deadline_is_of_each_dispatch_and_begins_when_the_one_before_has_ended(open_remote):
    backend = open_remote(deadline_s=10, in_flight=3, ranks=1, rows=1)
    backend._work_queue = WorkQueue(backend, clock=(clock := Clock()))
    with held(backend.training) as gate:
        completions = paced(backend, clock, 9, gate, rows("a", *[[1, 2]] * 5), a_step("a"))
    assert not any(isinstance(completion.result, ErrorResponse) for completion in completions)
    assert np.isfinite(logprobs(backend, "a")).all()


@pytest.mark.full
def test_whoever_waits_for_a_client_whose_backend_is_lost_is_told_why(open_remote):
    backend = open_remote(deadline_s=0.2)

    async def use() -> None:
        await BackendClient(backend).run(breaking(HANG))

    with pytest.raises(RuntimeError, match=r"the backend has stopped: a dispatch has not ended within deadline_s=0\.2"):
        asyncio.run(use())
