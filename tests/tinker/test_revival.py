"""Operations that a revival repeats: rows of the log in, operations out."""

from dataclasses import replace

import pytest

from skyrl.backends.operations import LoadSnapshot, Rejected
from skyrl.tinker.database.decisions import Decisions
from skyrl.tinker.database.log.replay_log import History, LoggedRequest
from skyrl.tinker.database.tables import ModelRow, SessionRow
from skyrl.tinker.requests.replay import Plan, Unrevivable, plan
from skyrl.types import SaveOutput

WRITTEN = SaveOutput("folder", 1, "digest")


def row(seq_id: int | None, kind: str = "forward_backward", status: str = "done", **facts) -> LoggedRequest:
    """A request that arrived at second `seq_id` and, unless pending, ended half a second later."""
    place = 99 if seq_id is None else seq_id
    plain = LoggedRequest(
        request_id=f"{kind}-{seq_id}",
        kind=kind,
        seq_id=seq_id,
        status=status,
        decided=Decisions(),
        gradients="kept",
        error="it failed" if status == "failed" else None,
        has_body=status != "failed",
        created_at=place,
        finished_at=None if status == "pending" else place + 0.5,
    )
    return replace(plain, **facts)


CREATION = row(0, "create_model")


def model(**facts) -> ModelRow:
    plain = {"model_id": "m", "session_id": "s", "tenant": "t", "base_model": "b", "lora_config": {}, "status": "live"}
    return ModelRow(**{**plain, **facts})


def snapshotted(seq_id: int, **facts) -> ModelRow:
    return model(snapshot_seq_id=seq_id, snapshot_folder="snapshot", snapshot_digest="d", **facts)


def planned(*rows: LoggedRequest, of: ModelRow | None = None, unwritten=None, files=None) -> Plan:
    history = History(of or model(), SessionRow(session_id="s", tenant="t"), list(rows), unwritten or {})
    return plan(history, files or {})


def steps(decision: Plan) -> list[str]:
    return [step.request_id for step in decision.steps]


def test_without_a_snapshot_everything_is_done_again_from_the_creation_on():
    decision = planned(CREATION, row(1), row(2, "optim_step"))
    assert decision.steps == [CREATION, row(1), row(2, "optim_step")] and decision.next_seq_id == 3


def test_with_a_snapshot_only_what_came_after_it_is_done_again():
    decision = planned(row(6), row(7, "optim_step"), of=snapshotted(5))
    assert decision.steps[1:] == [row(6), row(7, "optim_step")] and decision.next_seq_id == 8
    snapshot = decision.steps[0]
    assert isinstance(snapshot, LoadSnapshot) and (snapshot.path, snapshot.digest) == ("snapshot", "d")


def test_a_snapshot_alone_goes_on_behind_its_last_request():
    assert planned(of=snapshotted(5)).next_seq_id == 6


def test_a_failed_pass_before_the_snapshot_fails_the_next_step_still():
    decision = planned(of=snapshotted(5, snapshot_failed_pass="no such token"))
    rejected = decision.steps[1]
    assert isinstance(rejected, Rejected)
    assert (rejected.error, rejected.gradients) == ("no such token", "incomplete")


def test_a_model_whose_creation_is_pending_has_nothing_to_repeat():
    decision = planned(row(0, "create_model", "pending"), row(1, status="pending"), of=model(status="creating"))
    assert decision.steps == [] and decision.next_seq_id == 0


@pytest.mark.parametrize(
    "left_out",
    [
        row(1, decided=Decisions(forward_only=True)),
        row(1, "forward"),
        row(1, "save_weights", decided=Decisions(saved_to="folder")),
        row(1, "save_weights_for_sampler", decided=Decisions(saved_to="folder")),
        row(1, "save_weights_for_sampler", decided=Decisions(version="m@1")),
        row(1, "save_weights", "failed"),
        row(1, "optim_step", "failed"),
    ],
    ids=lambda request: f"{request.status} {request.kind} {request.decided}",
)
def test_what_left_the_model_as_it_was_is_left_out(left_out):
    decision = planned(CREATION, left_out)
    assert decision.steps == [CREATION] and decision.next_seq_id == 2


def test_a_load_is_done_again():
    assert steps(planned(CREATION, row(1, "load_weights"))) == ["create_model-0", "load_weights-1"]


@pytest.mark.parametrize("gradients", ["incomplete", "dropped"])
def test_a_failure_that_touched_the_gradients_stands_as_the_same_failure(gradients):
    rejected = planned(CREATION, row(1, status="failed", gradients=gradients)).steps[1]
    assert isinstance(rejected, Rejected) and (rejected.error, rejected.gradients) == ("it failed", gradients)


UNNAMED = row(1, "save_weights_for_sampler", decided=Decisions(version="m@1"))


def test_a_version_that_is_not_on_disk_is_published_again():
    assert planned(CREATION, UNNAMED, unwritten={"m@1": "folder"}).steps == [CREATION, UNNAMED]


def test_a_version_that_is_on_disk_is_not_published_again():
    decision = planned(CREATION, UNNAMED, unwritten={"m@1": "folder"}, files={"folder": WRITTEN})
    assert decision.steps == [CREATION]


SAVE = row(1, "save_weights", "pending", decided=Decisions(saved_to="folder"))


def test_a_save_in_flight_is_finished_from_its_files():
    decision = planned(CREATION, SAVE, row(2), files={"folder": WRITTEN})
    assert decision.from_files == {"save_weights-1": WRITTEN}
    assert steps(decision) == ["create_model-0", "forward_backward-2"]


def test_a_save_in_flight_without_files_is_done_again_in_its_place():
    decision = planned(CREATION, SAVE, row(2))
    assert steps(decision) == ["create_model-0", "save_weights-1", "forward_backward-2"]
    assert decision.from_files == {} and decision.missed == []


def test_a_save_without_files_before_the_snapshot_has_missed_its_moment():
    decision = planned(SAVE, of=snapshotted(5))
    assert decision.missed == ["save_weights-1"] and len(decision.steps) == 1


def test_a_save_before_the_snapshot_is_finished_from_its_files():
    decision = planned(SAVE, of=snapshotted(5), files={"folder": WRITTEN})
    assert decision.from_files == {"save_weights-1": WRITTEN} and decision.missed == []


def test_pending_requests_follow_the_revival():
    decision = planned(CREATION, row(1), row(2, status="pending"), row(4, status="pending"))
    assert steps(decision) == ["create_model-0", "forward_backward-1"] and decision.next_seq_id == 2


def test_a_request_that_came_after_its_followers_had_failed_is_left_to_the_scheduler():
    late = row(1, status="pending", created_at=5.0)
    decision = planned(CREATION, late, row(2, status="failed", gradients="incomplete"))
    assert steps(decision) == ["create_model-0", "forward_backward-2"] and decision.next_seq_id == 3


def test_a_request_before_one_that_was_refused_at_the_door_is_done_in_its_place():
    waiting, refused = row(1, status="pending"), row(2, status="failed")
    decision = planned(CREATION, waiting, refused)
    assert steps(decision) == ["create_model-0", "forward_backward-1"] and decision.next_seq_id == 3


def test_an_unloaded_model_publishes_what_is_missing_and_is_unloaded_again():
    unload = row(None, "unload_model")
    decision = planned(CREATION, UNNAMED, unload, of=model(status="unloaded"), unwritten={"m@1": "folder"})
    assert decision.steps == [CREATION, UNNAMED] and decision.unloaded


def test_an_unloading_that_overtook_a_save_does_not_come_before_it():
    save = row(2, "save_weights", "pending", decided=Decisions(saved_to="folder"))
    decision = planned(CREATION, row(1), save, row(None, "unload_model"), of=model(status="unloaded"))
    assert steps(decision) == [CREATION.request_id, row(1).request_id]
    assert decision.next_seq_id == 2 and decision.unloaded


def test_a_model_whose_unloading_is_pending_is_unloaded_by_that():
    assert not planned(CREATION, row(None, "unload_model", "pending"), of=model(status="unloaded")).unloaded


def test_a_log_without_a_body_that_is_needed_loses_the_model():
    with pytest.raises(Unrevivable) as error:
        planned(CREATION, row(1, has_body=False))
    assert error.value.lost


def test_a_model_without_its_snapshot_is_lost():
    with pytest.raises(Unrevivable) as error:
        planned(of=model(snapshot_seq_id=5))
    assert error.value.lost


@pytest.mark.parametrize("status", ["lost", "failed", "copy"])
def test_a_model_that_takes_no_requests_is_not_revived(status):
    with pytest.raises(Unrevivable):
        planned(CREATION, of=model(status=status))
