"""Snapshots that the engine makes by itself, and models revived from them."""

import dataclasses
import hashlib
import threading
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skyrl.backends.operations import DeleteModel, LoadCheckpoint, ModelOperation, Publish, Rejected, SaveCheckpoint
from skyrl.tinker.processes.messages import Done, Enqueue, FromEngine, Revive, Snapshotted, Stored
from skyrl.types import ErrorResponse, ModelOutput
from tests.fakes import POISON
from tests.tinker.engine_bench import Bench, a_pass, a_step, a_version, create, of, refused, revival, same

# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_a_model_is_snapshotted_after_every_so_many_steps_right_after_the_last_of_them(bench):
    engine = bench(snapshot_every_steps=2)
    said = engine.ask(create(), *[operation for _ in range(5) for operation in (a_pass(), a_step())])
    assert [frame.seq_id for frame in of(Snapshotted, said)] == [4, 8]


def test_a_snapshot_lies_in_the_models_folder_and_is_told_with_the_hash_of_its_manifest(bench, tmp_path):
    (told,) = of(Snapshotted, bench(snapshot_every_steps=1).ask(create("s:train:0"), a_step("s:train:0")))
    assert Path(told.path).parent == tmp_path / "checkpoints" / "s-train-0" / "snapshots"
    assert told.digest == hashlib.sha256((Path(told.path) / "manifest.json").read_bytes()).hexdigest()
    assert (told.model_id, told.seq_id) == ("s:train:0", 1) and told.size_bytes > 0


def test_completions_of_snapshots_are_no_results(bench):
    operations = [create(), a_step(), a_step()]
    said = bench(snapshot_every_steps=1).ask(*operations)
    assert [frame.request_id for frame in of(Done, said)] == [operation.request_id for operation in operations]


@pytest.mark.parametrize(
    ("option", "operation"), [("snapshot_every_requests", a_pass), ("snapshot_every_steps", a_step)]
)
def test_a_model_that_runs_in_front_of_its_snapshots_has_one_under_way_at_a_time(bench, option, operation):
    engine = bench(**{option: 1})
    held = threading.Event()
    engine.backend._writer.submit("m", "held", lambda: held.wait(30))
    engine.turn(*engine.enqueued(create(), *[operation() for _ in range(5)]))
    while engine.backend.busy:
        engine.turn()
    held.set()
    said = engine.rest()
    assert [frame.seq_id for frame in of(Snapshotted, said)] == [1 if option.endswith("steps") else 0, 5]


def test_a_loaded_checkpoint_is_snapshotted_at_once_because_its_files_may_be_deleted(bench, tmp_path):
    engine = bench()
    save = SaveCheckpoint(request_id="save", model_id="m", path=str(tmp_path / "save"))
    load = LoadCheckpoint(request_id="load", model_id="n", path=str(tmp_path / "save"))
    assert of(Snapshotted, engine.ask(create(), save)) == []
    assert [(frame.model_id, frame.seq_id) for frame in of(Snapshotted, engine.ask(load))] == [("n", 0)]


def test_a_snapshot_tells_that_the_next_step_has_to_fail(bench):
    said = bench(snapshot_every_steps=1, snapshot_every_requests=3).ask(
        create(), a_pass(), refused(error="row 3"), a_step()
    )
    assert [(frame.seq_id, frame.failed_pass) for frame in of(Snapshotted, said)] == [(2, "row 3"), (3, None)]


def test_versions_are_told_to_be_stored_before_the_snapshot_that_counts_on_them(bench, tmp_path):
    said = bench(snapshot_every_steps=1).ask(create(), a_version(tmp_path / "v"), a_step())
    (stored,) = of(Stored, said)
    (snapshot,) = of(Snapshotted, said)
    assert said.index(stored) < said.index(snapshot)
    digest = hashlib.sha256((tmp_path / "v" / "manifest.json").read_bytes()).hexdigest()
    assert (stored.version, stored.path, stored.digest) == ("v", str(tmp_path / "v"), digest)


def test_the_snapshot_of_a_model_that_was_deleted_meanwhile_is_removed(bench, tmp_path):
    engine = bench(snapshot_every_steps=1)
    delete = DeleteModel(request_id="delete", model_id="m")
    held = threading.Event()
    engine.backend._writer.submit("m", "held", lambda: held.wait(30))
    engine.turn(*engine.enqueued(create(), a_step()), Enqueue(delete))
    while engine.backend.busy:
        engine.turn()
    held.set()
    engine.rest()
    done = of(Done, engine.said)[-1]
    assert (done.request_id, done.result) == ("delete", ModelOutput("m")) and of(Snapshotted, engine.said) == []
    assert list((tmp_path / "checkpoints").rglob("manifest.json")) == []


def test_a_model_that_could_not_be_made_leaves_nothing_behind(bench, tmp_path):
    engine = bench()
    engine.ask(LoadCheckpoint(request_id="load", model_id="m", path=str(tmp_path / "nowhere")), a_step())
    assert not engine.engine.scheduler.knows("m") and engine.engine.policy.changed() == []


def test_a_snapshot_that_cannot_be_written_is_made_by_the_orderly_end(bench, tmp_path):
    engine = bench(snapshot_every_steps=1)
    folder = tmp_path / "checkpoints" / "m"
    folder.parent.mkdir()
    folder.write_text("a file where a folder should be")
    assert of(Snapshotted, engine.ask(create(), a_step(), a_step())) == []
    folder.unlink()
    assert [frame.seq_id for frame in of(Snapshotted, engine.end())] == [2]


# -- revival -----------------------------------------------------------------------------------------------------------


def test_a_revived_model_is_what_it_was_and_each_repeated_request_completes(bench):
    first = bench(snapshot_every_steps=1)
    after = [a_pass(2), a_pass(3)]
    (snapshot,) = of(Snapshotted, first.ask(create(), a_pass(), a_step(), *after))
    second = bench()
    frame = revival(snapshot, *after, next_seq_id=5)
    said = second.rest(frame)
    assert [done.request_id for done in of(Done, said)] == [operation.request_id for operation in frame.operations]
    assert same(second.backend.models["m"], first.backend.models["m"])


def test_requests_that_are_already_there_follow_a_revival_in_their_order(bench):
    (snapshot,) = of(Snapshotted, bench(snapshot_every_steps=1).ask(create(), a_step()))
    second, following = bench(), [a_pass(), a_step(), a_pass()]
    said = second.rest(revival(snapshot), *reversed(second.enqueued(*following, first=2)))
    assert [done.request_id for done in of(Done, said)][1:] == [operation.request_id for operation in following]
    assert second.backend.models["m"].step == 2


def test_a_revival_that_fails_is_reported_with_the_path_and_fails_what_follows(bench, tmp_path):
    lost = Snapshotted("m", 3, str(tmp_path / "nowhere"), "digest", 1, None)
    engine = bench()
    first, second = of(Done, engine.rest(revival(lost, a_pass())))
    assert "nowhere" in first.result.error and "model_id=m is not loaded" in second.result.error
    assert not engine.engine.scheduler.knows("m")


def test_a_model_is_not_snapshotted_while_its_past_is_repeated(bench):
    (snapshot,) = of(Snapshotted, bench(snapshot_every_steps=1).ask(create(), a_step()))
    said = bench(snapshot_every_steps=1).rest(revival(snapshot, a_step(), a_step(), a_step(), next_seq_id=9))
    assert [frame.seq_id for frame in of(Snapshotted, said)] == [8]


def requests(kinds: list[str], folder: Path) -> list[ModelOperation]:
    """A model's creation and what follows. Loads read the save before them; request ids are places."""
    operations: list[ModelOperation] = [dataclasses.replace(create(), request_id="0")]
    saved = folder / "nowhere"
    for place, kind in enumerate(kinds, 1):
        names = {"request_id": str(place), "model_id": "m"}
        match kind:
            case "save":
                saved = folder / str(place)
                operation = SaveCheckpoint(**names, path=str(saved))
            case "load":
                operation = LoadCheckpoint(**names, path=str(saved))
            case "publish":
                operation = Publish(**names, version=str(place), path=str(folder / str(place)), persist=False)
            case "step":
                operation = dataclasses.replace(a_step(), request_id=str(place))
            case "refused pass":
                operation = dataclasses.replace(refused(), request_id=str(place))
            case _:
                token = POISON if kind == "bad pass" else 20 + place
                operation = dataclasses.replace(a_pass(token), request_id=str(place))
        operations.append(operation)
    return operations


KINDS = ["pass", "step", "pass", "step", "bad pass", "refused pass", "save", "load", "publish"]


@pytest.mark.full
@settings(deadline=None, max_examples=60)
@example(kinds=["pass", "step", "pass", "step", "pass"], lives=[(40, True)])
@example(kinds=["pass", "bad pass", "step", "publish"], lives=[(40, False)])
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=14),
    lives=st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=3),
)
def test_a_model_whose_engine_is_lost_again_and_again_ends_as_one_whose_engine_never_was(
    kinds, lives, tmp_path_factory
):
    """A life is so many turns, and whether the disk keeps up with them."""
    folder = tmp_path_factory.mktemp("undisturbed")
    undisturbed = Bench(folder)
    undisturbed.ask(*requests(kinds, folder))
    results = {done.request_id: done.result for done in of(Done, undisturbed.said)}

    folder = tmp_path_factory.mktemp("lost")
    operations = requests(kinds, folder)
    answers: dict[str, object] = {}
    snapshot: Snapshotted | None = None
    for turns, written in [*lives, (None, True)]:
        engine = Bench(folder, snapshot_every_steps=2, snapshot_every_requests=5)
        said = _recover(engine, operations, answers, snapshot)
        if turns is None:
            said += engine.rest()
        for _ in range(turns or 0):
            if written:
                engine.write()
            said += engine.turn()
        for frame in said:
            if isinstance(frame, Done):
                answers.setdefault(frame.request_id, frame.result)
            elif isinstance(frame, Snapshotted):
                snapshot = frame
        final = engine.backend.models.get("m")
        engine.close()
    assert final is not None and same(final, undisturbed.backend.models["m"])
    assert {name: _told(answers[name]) for name in results} == {name: _told(results[name]) for name in results}
    undisturbed.close()


def _recover(
    engine: Bench, operations: list[ModelOperation], answers: dict[str, object], snapshot: Snapshotted | None
) -> list[FromEngine]:
    """Bring the model back as the API does: repeat what was answered and is in no snapshot, then ask for the rest."""
    answered = [place for place, operation in enumerate(operations) if operation.request_id in answers]
    if not answered and snapshot is None:
        return engine.turn(*engine.enqueued(*operations))
    covered = -1 if snapshot is None else snapshot.seq_id
    following = max([covered, *answered]) + 1
    repeated: list[ModelOperation] = []
    for operation in operations[covered + 1 : following]:
        result = answers.get(operation.request_id)
        if isinstance(result, ErrorResponse):
            if result.gradients != "kept":
                repeated.append(
                    Rejected(
                        request_id=operation.request_id, model_id="m", error=result.error, gradients=result.gradients
                    )
                )
        elif result is None or not isinstance(operation, SaveCheckpoint):
            repeated.append(operation)
    missing = [Enqueue(operation, seq_id) for seq_id, operation in enumerate(operations) if seq_id >= following]
    for operation in operations[: covered + 1]:
        if operation.request_id not in answers:
            assert isinstance(operation, SaveCheckpoint), "a snapshot goes no further than what has ended"
            answers[operation.request_id] = "found on disk"  # by the API
    if snapshot is None:
        frame = Revive("m", following, repeated)
    else:
        frame = revival(snapshot, *repeated, next_seq_id=following)
    return engine.turn(frame, *missing)


def _told(result: object) -> object:
    """Return the part of an answer that does not depend on the place of its files."""
    if isinstance(result, ErrorResponse):
        return result.gradients
    if dataclasses.is_dataclass(result) and hasattr(result, "metrics"):
        return result.metrics  # pyright: ignore[reportAttributeAccessIssue]
    return "done"
