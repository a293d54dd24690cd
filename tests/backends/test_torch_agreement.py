"""Ranks agree before the first collective of a command: what one of them cannot do fails its request, and no more."""

import random
import threading
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch_models import VOCAB, make_model

from driver import create, datum, finish, finish_all, new_id, random_datum, sample, stepping
from skyrl.backends.operations import ForwardBackward, Publish
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.backends.torch.workers.agreement import Agreement, DifferentPlans, NotBegun
from skyrl.backends.torch.workers.group import WorkerGroup
from skyrl.types import ErrorResponse, ForwardBackwardOutput, OptimStepOutput, SampleOutput

DATA = [random_datum(length, vocab=VOCAB) for length in (40, 50)]
"""A micro-batch for each of two ranks."""


def agreed(folder: Path, given: list[tuple[object, Exception | None]]) -> list[Exception | None]:
    """Answers of an agreement to ranks, a thread each, with these plans and failures."""
    told: list[Exception | None] = [None] * len(given)

    def live(rank: int) -> None:
        store = dist.FileStore(str(folder / "meeting"), len(given))  # pyright: ignore[reportPrivateImportUsage]
        group = dist.ProcessGroupGloo(store, rank, len(given), timedelta(seconds=60))
        told[rank] = Agreement(group).refusal(*given[rank])

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_ranks_with_the_same_plan_begin_it(tmp_path):
    plan = "step", 12, (1, None), np.zeros(3)
    assert agreed(tmp_path, [(plan, None)] * 3) == [None] * 3


def test_a_rank_that_cannot_do_its_part_keeps_its_reason_and_the_others_do_not_begin(tmp_path):
    error = MemoryError("no room")
    first, second, third = agreed(tmp_path, [("plan", None), ("plan", error), ("plan", None)])
    assert second is error
    assert isinstance(first, NotBegun) and isinstance(third, NotBegun)
    assert "rank 1 of those that compute this together cannot do its part" in str(first)


@pytest.mark.parametrize("other", [("step", 2), ("step", 1, None), ("get", 1), ("step", np.zeros(1, np.float32))])
def test_ranks_with_different_plans_do_not_begin(tmp_path, other):
    assert all(isinstance(told, DifferentPlans) for told in agreed(tmp_path, [(("step", 1), None), (other, None)]))


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    sizes = {"max_lora_rank": 8, "max_context_length": 64, "train_tile_tokens": 64, "kv_cache_gib": 0.01}
    folder = make_model(tmp_path_factory.mktemp("llama"), "llama")
    config = TorchBackendConfig(workers="processes", num_workers=2, fsdp_size=-1, **sizes)
    backend = TorchBackend(str(folder), config)
    yield backend
    backend.close()


@pytest.fixture
def models(backend):
    """Two models, of which something of the first is amiss on the second rank."""
    names = [new_id(), new_id()]
    for name in names:
        create(backend, name)
    return names


def a_pass(model: str, data=DATA) -> ForwardBackward:
    return ForwardBackward(request_id=new_id(), model_id=model, data=data, loss_fn="cross_entropy")


def assert_works(backend: TorchBackend, model: str) -> None:
    assert isinstance(finish(backend, a_pass(model)), ForwardBackwardOutput)
    assert isinstance(finish(backend, stepping(model)), OptimStepOutput)
    assert isinstance(sample(backend, None, max_tokens=2), SampleOutput)


def on_second(backend: TorchBackend, *command) -> None:
    """Have the second rank alone do a command."""
    answers = backend.group._execute([[], [command]]).result()
    assert not isinstance(answers[1][0], Exception), answers


@pytest.mark.full
@pytest.mark.parametrize("amiss", ["freed", "too large"])
def test_a_rank_without_the_weights_fails_the_requests_of_their_model_only(backend, models, caplog, amiss):
    broken, sound = models
    handle = backend._models.peek(broken).weights.handle
    on_second(backend, "free", handle)
    if amiss == "too large":
        on_second(backend, "zeros", handle, 2**60, "replicated")
    passes = [a_pass(model) for model in (broken, sound, sound, broken)]
    results = finish_all(backend, passes)
    of_sound = [results[one.request_id] for one in passes if one.model_id == sound]
    assert all(isinstance(result, ForwardBackwardOutput) for result in of_sound)
    assert isinstance(finish(backend, a_pass(broken)), ErrorResponse)
    assert isinstance(finish(backend, stepping(broken)), ErrorResponse)
    why = {"freed": "rank 1 has no buffer", "too large": "rank 1 could not make a buffer of this model: RuntimeError"}
    assert why[amiss] in caplog.text
    assert_works(backend, sound)


def test_weights_that_only_one_rank_lacks_are_saved_by_the_others(backend, models, tmp_path):
    broken, sound = models
    on_second(backend, "free", backend._models.peek(broken).weights.handle)
    saving = Publish(request_id=new_id(), model_id=broken, version=new_id(), path=str(tmp_path / "v"), persist=True)
    assert not isinstance(finish(backend, saving), ErrorResponse)
    assert_works(backend, sound)


@pytest.mark.full
def test_tokens_outside_the_vocabulary_are_the_senders_error(backend, models):
    bad, good = datum([1, 2, VOCAB, 3] * 10), DATA[1]
    failed = finish(backend, a_pass(models[0], [bad, good]))
    assert isinstance(failed, ErrorResponse) and failed.status == "user", failed
    assert f"send ids from 0 to {VOCAB - 1}" in failed.error
    assert_works(backend, models[1])


class Planned(WorkerGroup):
    """Ranks that only count what they begin together, and refuse tiles with a bad row.

    If `without` is a tile, ranks that are idle beside it refuse its idle copies.
    """

    def __init__(self, world: int, tile_ranks: int, bad: set[int], without: int | None = None):
        super().__init__()
        self.world, self._bad, self._without = world, bad, without
        self.facts: Any = SimpleNamespace(is_sharded=True, tile_ranks=tile_ranks)
        self.begun: list[list[tuple]] = [[] for _ in range(world)]

    def lost(self, error):
        raise error

    def close(self):
        pass

    def _execute(self, plans):
        refused = [
            [command[1] == self._without if command[-1] is True else command[1] in self._bad for command in plan]
            for plan in plans
        ]
        if any(map(any, refused)):
            answers = [[ValueError("bad row") if no else NotBegun("another") for no in plan] for plan in refused]
        else:
            answers = [[command[1] for command in plan] for plan in plans]
            for begun, plan in zip(self.begun, plans, strict=True):
                begun += plan
        outcome: Future = Future()
        outcome.set_result(answers)
        return outcome


def test_in_a_thousand_random_plans_ranks_begin_as_much_and_only_bad_tiles_fail():
    draw = random.Random(0)
    for _ in range(1000):
        tile_ranks = draw.choice([1, 2, 3])
        at_once = draw.randint(1, 6)
        count = draw.randint(1, 3 * at_once)
        bad = {tile for tile in range(count) if draw.random() < 0.3}
        group = Planned(at_once * tile_ranks, tile_ranks, bad)
        answers = group.tiles([("tile", tile) for tile in range(count)]).result()
        good = [tile for tile in range(count) if tile not in bad]
        assert [tile for tile in answers if not isinstance(tile, Exception)] == good
        assert all(isinstance(answers[tile], ValueError) for tile in bad)
        assert len({len(begun) for begun in group.begun}) == 1, "as much on each rank"
        done = [command[1] for begun in group.begun for command in begun if command[-1] is not True]
        assert sorted(done) == sorted(good * tile_ranks), "each tile once, by all ranks that share it"


@pytest.mark.parametrize("count", [1, 3, 5])
def test_an_idle_rank_that_cannot_take_part_fails_the_tile_that_it_has_a_copy_of(count):
    answers = Planned(2, 1, set(), without=0).tiles([("tile", tile) for tile in range(count)]).result()
    assert isinstance(answers[0], ValueError) and answers[1:] == list(range(1, count))
