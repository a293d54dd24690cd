"""The scheduler, with plain operations and a clock that is a number."""

import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skyrl.backends.operations import (
    CreateModel,
    DeleteModel,
    ForwardBackward,
    LoadSnapshot,
    ModelOperation,
    Operation,
    OptimStep,
    Rejected,
    Sample,
    SaveCheckpoint,
)
from skyrl.tinker.engine.scheduler import Scheduler
from skyrl.types import AdamParams, Datum, LoraConfig, SamplingParams

TIMEOUT_S = 300.0
WINDOW = 10 * 64
"""Tokens of samples of a tenant that go at a time."""


def create(model: str = "m") -> CreateModel:
    return CreateModel(request_id=f"{model}0", model_id=model, lora_config=LoraConfig())


def save(seq_id: int, model: str = "m") -> SaveCheckpoint:
    return SaveCheckpoint(request_id=f"{model}{seq_id}", model_id=model, path="p")


def a_pass(seq_id: int, tokens: int = 3) -> ForwardBackward:
    datum = Datum(np.zeros(tokens, np.int32), {"target_tokens": np.zeros(tokens, np.int64)})
    return ForwardBackward(request_id=f"m{seq_id}", model_id="m", data=[datum], loss_fn="cross_entropy")


def optim(seq_id: int) -> OptimStep:
    return OptimStep(request_id=f"m{seq_id}", model_id="m", adam_params=AdamParams())


def sample(request_id: str) -> Sample:
    params = SamplingParams(max_tokens=5, seed=0)
    return Sample(request_id=request_id, version=None, prompt=np.zeros(4, np.int32), params=params, num_samples=2)


def with_model(*operations: tuple[int, ModelOperation], now: float = 0.0) -> Scheduler:
    """A scheduler in which model m was created and these (seq_id, operation) arrived."""
    scheduler = Scheduler(TIMEOUT_S, WINDOW)
    scheduler.add(create(), 0, 0.0)
    for seq_id, operation in operations:
        scheduler.add(operation, seq_id, now)
    return scheduler


def submitted(scheduler: Scheduler) -> list[Operation]:
    """Everything that leaves if each operation ends at once."""
    operations = []
    while (operation := scheduler.next()) is not None:
        operations.append(operation)
        scheduler.done(operation)
    return operations


def ids(operations: list[Operation]) -> list[str]:
    return [operation.request_id for operation in operations]


@given(order=st.permutations(range(1, 9)), take_between=st.lists(st.booleans(), min_size=8, max_size=8))
def test_a_model_runs_in_seq_id_order_whatever_order_its_requests_arrive_in(order, take_between):
    scheduler, ran = with_model(), []
    for seq_id, take in zip(order, take_between, strict=True):
        scheduler.add(save(seq_id), seq_id, 0.0)
        if take:
            ran += submitted(scheduler)
    ran += submitted(scheduler)
    assert ids(ran) == [f"m{seq_id}" for seq_id in range(9)]
    assert scheduler.deadline() == math.inf


@given(arrivals=st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_each_seq_id_runs_once_and_is_refused_when_it_comes_again(arrivals):
    scheduler, ran = with_model(), []
    for seq_id in [*arrivals, *range(1, 6)]:
        scheduler.add(save(seq_id) if seq_id else create(), seq_id, 0.0)
        ran += submitted(scheduler)
    refused = [operation for operation in ran if isinstance(operation, Rejected)]
    assert ids([operation for operation in ran if operation not in refused]) == [f"m{seq_id}" for seq_id in range(6)]
    assert all(operation.gradients == "kept" and "after its followers" in operation.error for operation in refused)


def test_a_gap_in_one_model_does_not_hold_another():
    scheduler = with_model((2, save(2)))
    scheduler.add(create("n"), 0, 0.0)
    scheduler.add(save(1, "n"), 1, 0.0)
    assert ids(submitted(scheduler)) == ["m0", "n0", "n1"]


def test_a_held_request_is_announced_with_the_missing_seq_id_and_released_when_it_comes():
    scheduler = with_model((2, save(2)))
    assert scheduler.notices() == [("m2", "waiting for the request with seq_id=1, which has not arrived")]
    scheduler.add(save(1), 1, 0.0)
    assert scheduler.notices() == [("m2", None)]


def test_requests_of_a_model_that_was_never_created_are_not_held():
    scheduler = Scheduler(TIMEOUT_S, WINDOW)
    scheduler.add(save(7), 7, 0.0)
    assert ids(submitted(scheduler)) == ["m7"]


def test_held_requests_fail_at_the_deadline_and_name_the_missing_seq_id():
    scheduler = with_model((2, save(2)), (3, a_pass(3)), now=10.0)
    scheduler.expire(10.0 + TIMEOUT_S - 1)
    assert ids(submitted(scheduler)) == ["m0"]
    assert scheduler.deadline() == 10.0 + TIMEOUT_S
    scheduler.expire(10.0 + TIMEOUT_S)
    failed = submitted(scheduler)
    assert ids(failed) == ["m2", "m3"]
    assert all(isinstance(operation, Rejected) and "seq_id=1 did not arrive" in operation.error for operation in failed)


def test_a_held_request_that_is_refused_says_so_in_its_place():
    scheduler = with_model((2, a_pass(2)))
    refusal = Rejected(request_id="m2", model_id="m", error="not wanted any more", gradients="incomplete")
    assert scheduler.refuse(refusal)
    scheduler.add(save(1), 1, 0.0)
    assert submitted(scheduler)[-2:] == [save(1), refusal]


def test_a_held_request_that_is_refused_says_so_when_what_it_waits_for_does_not_come():
    scheduler = with_model((2, save(2)))
    scheduler.refuse(Rejected(request_id="m2", model_id="m", error="not wanted any more"))
    scheduler.expire(TIMEOUT_S)
    failed = submitted(scheduler)[-1]
    assert isinstance(failed, Rejected)
    assert (failed.request_id, failed.error) == ("m2", "not wanted any more")
    assert failed.gradients == "incomplete"  # what is missing may have been a pass


def test_what_was_submitted_cannot_be_refused_any_more():
    scheduler = with_model((1, save(1)))
    submitted(scheduler)
    assert not scheduler.refuse(Rejected(request_id="m1", model_id="m", error="not wanted any more"))


def test_a_model_goes_on_with_the_next_request_after_a_gap_expired():
    scheduler = with_model((2, save(2)))
    scheduler.expire(TIMEOUT_S)
    scheduler.add(save(3), 3, TIMEOUT_S)
    assert submitted(scheduler)[-1] == save(3)


def test_what_still_arrives_is_not_given_up():
    scheduler = with_model((3, save(3)))
    scheduler.add(save(2), 2, TIMEOUT_S - 1)
    assert scheduler.deadline() == 2 * TIMEOUT_S - 1


def test_a_request_that_was_turned_away_still_arrives():
    scheduler = with_model((2, save(2)))
    scheduler.turned_away("m", TIMEOUT_S - 1)
    assert scheduler.deadline() == 2 * TIMEOUT_S - 1


def test_a_request_that_was_turned_away_gives_no_deadline_to_a_model_that_holds_none():
    scheduler = with_model()
    scheduler.turned_away("m", 1.0)
    assert scheduler.deadline() == math.inf


def test_a_gap_that_moves_on_gets_a_new_deadline():
    scheduler = with_model((3, save(3)))
    scheduler.add(save(1), 1, 200.0)
    assert scheduler.deadline() == 200.0 + TIMEOUT_S


def test_a_held_optimizer_step_comes_right_after_a_failed_pass_so_that_it_fails_and_clears_the_sums():
    scheduler = with_model((1, a_pass(1)), (3, optim(3)))
    scheduler.expire(TIMEOUT_S)
    *_, poison, step = submitted(scheduler)
    assert isinstance(poison, Rejected) and poison.gradients == "incomplete"
    assert step == optim(3)


def test_a_failure_that_nobody_asked_for_is_not_reported():
    scheduler = with_model((2, optim(2)))
    scheduler.expire(TIMEOUT_S)
    reported = []
    while (operation := scheduler.next()) is not None:
        if scheduler.done(operation):
            reported.append(operation.request_id)
    assert reported == ["m0", "m2"]


def test_a_request_that_arrives_after_its_followers_failed_is_refused():
    scheduler = with_model((2, save(2)))
    scheduler.expire(TIMEOUT_S)
    submitted(scheduler)
    scheduler.add(a_pass(1), 1, TIMEOUT_S + 1)
    (late,) = submitted(scheduler)
    assert isinstance(late, Rejected) and late.gradients == "kept" and "send all of them again" in late.error


def test_deleting_a_model_fails_what_it_holds_at_once():
    scheduler = with_model((2, save(2)))
    scheduler.add(DeleteModel(request_id="delete", model_id="m"), None, 1.0)
    assert ids(submitted(scheduler)) == ["m0", "m2", "delete"]
    assert scheduler.deadline() == math.inf


def test_a_deleted_model_id_can_be_created_again():
    scheduler = with_model()
    scheduler.add(DeleteModel(request_id="delete", model_id="m"), None, 0.0)
    submitted(scheduler)
    scheduler.add(create(), 0, 0.0)
    assert ids(submitted(scheduler)) == ["m0"]


def test_a_deleted_model_leaves_nothing_behind_even_if_requests_were_held_meanwhile():
    scheduler = with_model()
    scheduler.add(DeleteModel(request_id="delete", model_id="m"), None, 0.0)
    scheduler.add(save(5), 5, 0.0)
    assert ids(submitted(scheduler)) == ["m0", "delete", "m5"]
    assert not scheduler.knows("m") and scheduler.idle("m") and scheduler.deadline() == math.inf
    assert not (scheduler._lines or scheduler._gaps or scheduler._seq_ids or scheduler._unfinished)


# -- how far a model is ------------------------------------------------------------------------------------------------


def revived(next_seq_id: int, *operations: ModelOperation) -> Scheduler:
    scheduler = Scheduler(TIMEOUT_S, WINDOW)
    scheduler.revive("m", next_seq_id, operations)
    return scheduler


REVIVAL = LoadSnapshot(request_id="revival", model_id="m", path="p", digest="d")


def test_a_revived_model_repeats_its_past_in_order_and_goes_on_with_its_next_request():
    scheduler = revived(8, REVIVAL, a_pass(5), optim(7))
    scheduler.add(save(9), 9, 0.0)
    scheduler.add(save(8), 8, 0.0)
    assert ids(submitted(scheduler)) == ["revival", "m5", "m7", "m8", "m9"]


@given(seq_id=st.integers(0, 7))
def test_a_request_from_before_a_revival_that_comes_now_is_refused(seq_id):
    scheduler = revived(8, REVIVAL)
    scheduler.add(save(seq_id), seq_id, 0.0)
    _, late = submitted(scheduler)
    assert isinstance(late, Rejected) and late.gradients == "kept" and "send all of them again" in late.error


def test_a_revived_model_has_its_place_once_all_of_its_past_has_ended():
    scheduler = revived(8, REVIVAL, a_pass(5))
    scheduler.add(save(8), 8, 0.0)
    places = []
    for _ in range(3):
        operation = scheduler.next()
        assert operation is not None
        scheduler.done(operation)
        places.append(scheduler.finished("m"))
    assert places == [None, 7, 8]


@given(order=st.permutations(range(1, 9)), ends=st.lists(st.booleans(), min_size=8, max_size=8))
def test_the_place_of_a_model_is_that_of_what_has_ended_and_it_is_idle_when_all_has(order, ends):
    scheduler, outstanding, ended = with_model(), [], -1
    for seq_id, end in zip(order, ends, strict=True):
        scheduler.add(save(seq_id), seq_id, 0.0)
        while (operation := scheduler.next()) is not None:
            outstanding.append(operation)
        if end and outstanding:
            operation = outstanding.pop(0)
            ended = int(operation.request_id[1:])
            scheduler.done(operation)
        assert scheduler.finished("m") == (ended if ended >= 0 else None)
        assert scheduler.idle("m") == (not outstanding and not scheduler._lines["m"].held)


def test_a_late_request_does_not_move_a_models_place():
    scheduler = with_model((1, save(1)), (2, save(2)))
    submitted(scheduler)
    scheduler.add(replace(save(1), request_id="late"), 1, 0.0)
    assert ids(submitted(scheduler)) == ["late"]
    assert scheduler.finished("m") == 2


def test_a_model_that_is_forgotten_fails_what_it_holds_and_leaves_nothing_behind():
    scheduler = with_model((2, save(2)))
    submitted(scheduler)
    scheduler.forget("m", "its model could not be made")
    (failed,) = submitted(scheduler)
    assert isinstance(failed, Rejected) and "its model could not be made" in failed.error
    assert not (scheduler._lines or scheduler._gaps or scheduler._seq_ids or scheduler._unfinished)


# -- tenants ----------------------------------------------------------------------------------------------------------


def test_what_is_made_of_a_request_belongs_to_its_tenant():
    scheduler = Scheduler(TIMEOUT_S, WINDOW)
    scheduler.add(replace(create(), tenant="t"), 0, 0.0)
    scheduler.add(replace(optim(2), tenant="t"), 2, 0.0)
    scheduler.expire(TIMEOUT_S)
    operations = submitted(scheduler)
    assert ids(operations) == ["m0", "before m2", "m2"] and {operation.tenant for operation in operations} == {"t"}
    assert scheduler.tenant("m") == "t" and scheduler.tenant("nobody") == ""


# -- samples -----------------------------------------------------------------------------------------------------------


def test_a_flood_of_samples_does_not_hold_a_model_operation_back():
    scheduler = Scheduler(TIMEOUT_S, WINDOW)
    for i in range(100):
        scheduler.add(sample(f"s{i}"), None, 0.0)
    scheduler.add(create(), 0, 0.0)
    operation = scheduler.next()
    assert operation is not None and operation.request_id == "m0"


def test_a_waiting_sample_can_be_dropped():
    scheduler = Scheduler(TIMEOUT_S, WINDOW)
    scheduler.add(sample("s"), None, 0.0)
    assert scheduler.drop_sample("s")
    assert scheduler.next() is None


def test_of_a_tenants_flood_no_more_goes_than_its_window_and_the_rest_as_that_ends():
    scheduler = Scheduler(TIMEOUT_S, WINDOW)
    flood = [sample(f"s{i}") for i in range(100)]  # of 14 tokens, of which each counts 10
    for one in flood:
        scheduler.add(one, None, 0.0)
    gone = list(iter(scheduler.next, None))
    scheduler.done(flood[3])
    assert gone + list(iter(scheduler.next, None)) == flood[:65]


def test_a_tenants_window_leaves_that_of_others_as_it_is():
    scheduler = Scheduler(TIMEOUT_S, WINDOW)
    for i in range(100):
        scheduler.add(sample(f"s{i}"), None, 0.0)
    late = replace(sample("late"), tenant="other")
    assert len(list(iter(scheduler.next, None))) == 64
    scheduler.add(late, None, 0.0)
    assert list(iter(scheduler.next, None)) == [late]


def test_a_sample_that_is_here_already_is_ignored():
    scheduler = Scheduler(TIMEOUT_S, WINDOW)
    scheduler.add(sample("s"), None, 0.0)
    scheduler.add(sample("s"), None, 0.0)
    assert len(list(iter(scheduler.next, None))) == 1
    scheduler.add(sample("s"), None, 0.0)
    assert scheduler.next() is None


@given(
    items=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=60), window=st.integers(64, 64 * 20)
)
def test_every_sample_goes_once_and_a_tenants_in_the_order_of_their_arrival(items, window):
    scheduler = Scheduler(TIMEOUT_S, window)
    for i, (tenant, length) in enumerate(items):
        scheduler.add(replace(sample(str(i)), tenant=tenant, prompt=np.zeros(length, np.int32)), None, 0.0)
    order = []
    while (operation := scheduler.next()) is not None:
        order.append(int(operation.request_id))
        scheduler.done(operation)
    assert sorted(order) == list(range(len(items)))
    for tenant in "abc":
        mine = [i for i in order if items[i][0] == tenant]
        assert mine == sorted(mine)
    assert not (scheduler._samples._tenants or scheduler._samples._out)
