"""Times of snapshots of a model, with plain operations and a clock that is a number."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl.backends.operations import (
    CreateModel,
    ForwardBackward,
    LoadCheckpoint,
    LoadSnapshot,
    ModelOperation,
    OptimStep,
    Publish,
    Rejected,
    SaveCheckpoint,
)
from skyrl.tinker.engine.snapshot_policy import FIRST_PAUSE_S, LONGEST_PAUSE_S, SnapshotPolicy
from skyrl.types import AdamParams, Datum, LoraConfig

CREATION = CreateModel(request_id="r", model_id="m", lora_config=LoraConfig())
STEP = OptimStep(request_id="r", model_id="m", adam_params=AdamParams())
SAVE = SaveCheckpoint(request_id="r", model_id="m", path="p")
VERSION = Publish(request_id="r", model_id="m", version="v", path="p")
LOAD = LoadCheckpoint(request_id="r", model_id="m", path="p")
REVIVAL = LoadSnapshot(request_id="r", model_id="m", path="p", digest="d")
REFUSED = Rejected(request_id="r", model_id="m", error="bad name")


def a_pass(tokens: int = 1, forward_only: bool = False) -> ForwardBackward:
    """One that takes 4 bytes per token."""
    data = [Datum(np.zeros(tokens, np.int32), {})]
    return ForwardBackward(request_id="r", model_id="m", data=data, loss_fn="cross_entropy", forward_only=forward_only)


def after(*operations: ModelOperation, whole: bool = False) -> SnapshotPolicy:
    policy = SnapshotPolicy(every_steps=3, every_requests=10, every_bytes=1000)
    for operation in operations:
        policy.note(operation, whole)
    return policy


@pytest.mark.parametrize(
    ("operations", "due"),
    [
        ([STEP] * 2, False),
        ([STEP] * 3, True),
        ([a_pass()] * 9, False),
        ([a_pass()] * 10, True),
        ([a_pass(tokens=249)], False),
        ([a_pass(tokens=250)], True),
        ([LOAD], True),
        ([CREATION], False),
        ([REVIVAL], False),
        ([a_pass(tokens=250, forward_only=True)] * 10, False),
        ([SAVE, VERSION, REFUSED] * 10, False),
        ([*[SAVE] * 9, STEP], True),
    ],
)
def test_a_snapshot_is_due_after_enough_steps_requests_or_bytes_of_a_model_that_changed(operations, due):
    assert after(*operations).due(0.0) == (["m"] if due else [])


@pytest.mark.parametrize(
    ("operation", "changed"),
    [(CREATION, True), (STEP, True), (LOAD, True), (a_pass(), True), (REVIVAL, False), (SAVE, False), (REFUSED, False)],
)
def test_a_model_has_changed_after_what_may_have_changed_it(operation, changed):
    assert after(operation).changed() == (["m"] if changed else [])


@pytest.mark.parametrize(
    ("operations", "due"),
    [
        ([STEP] * 9, False),
        ([STEP, SAVE], True),
        ([SAVE], False),
        ([SAVE, STEP], True),
        ([STEP] * 10, True),
        ([a_pass(tokens=250)], True),
        ([LOAD], True),
    ],
)
def test_a_model_that_is_trained_as_a_whole_is_snapshotted_with_its_checkpoints(operations, due):
    assert after(*operations, whole=True).due(0.0) == ["m"] * due


def test_a_refused_pass_is_a_change_because_the_next_step_has_to_fail():
    assert after(Rejected(request_id="r", model_id="m", error="e", gradients="incomplete")).changed() == ["m"]


def test_a_model_has_one_snapshot_under_way_and_what_comes_meanwhile_counts_for_the_next():
    policy = after(*[STEP] * 3)
    policy.begin("m")
    for _ in range(3):
        policy.note(STEP)
    assert policy.due(0.0) == [] and policy.under_way("m")
    policy.succeeded("m")
    assert policy.due(0.0) == ["m"]


def test_a_snapshot_that_succeeds_starts_the_counts_anew():
    policy = after(*[STEP] * 3)
    policy.begin("m")
    policy.succeeded("m")
    assert policy.due(0.0) == [] and policy.changed() == []


def test_a_failed_snapshot_is_tried_again_after_pauses_that_grow_to_a_limit():
    policy, now, pauses = after(*[STEP] * 3), 0.0, []
    for _ in range(12):
        policy.begin("m")
        policy.failed("m", now)
        again = policy.deadline(now)
        assert policy.due(again - 0.001) == [] and policy.due(again) == ["m"] and policy.deadline(again) == math.inf
        pauses.append(again - now)
        now = again
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S] and pauses[-1] == LONGEST_PAUSE_S


def test_a_failed_snapshot_loses_no_count():
    policy = after(STEP, STEP)
    policy.begin("m")
    policy.note(STEP)
    policy.failed("m", 0.0)
    assert policy.due(LONGEST_PAUSE_S) == ["m"]


def test_a_model_that_is_forgotten_is_never_due_however_its_snapshot_ends():
    for end in (SnapshotPolicy.succeeded, lambda policy, model: policy.failed(model, 0.0)):
        policy = after(*[STEP] * 3)
        policy.begin("m")
        policy.forget("m")
        end(policy, "m")
        assert policy.due(math.inf) == [] and policy.deadline(0.0) == math.inf and policy.changed() == []


EVENTS = st.lists(st.sampled_from(["step", "begin", "succeed", "fail"]), max_size=40)


@pytest.mark.full
@given(EVENTS)
def test_every_step_is_covered_by_a_snapshot_that_succeeded_or_counts_for_the_next(events):
    policy = SnapshotPolicy(every_steps=3, every_requests=100, every_bytes=2**20)
    open_steps, covered = 0, None  # an independent account: not covered yet, and covered by the one under way
    for event in events:
        if event == "step":
            policy.note(STEP)
            open_steps += 1
        elif event == "begin" and policy.due(math.inf):
            policy.begin("m")
            open_steps, covered = 0, open_steps
        elif event == "succeed" and covered is not None:
            policy.succeeded("m")
            covered = None
        elif event == "fail" and covered is not None:
            policy.failed("m", 0.0)
            open_steps, covered = open_steps + covered, None
        assert bool(policy.due(math.inf)) == (open_steps >= 3 and covered is None)
        assert bool(policy.changed()) == (open_steps > 0)
