"""What the engine does so that a model survives it: snapshots, revival, parking, its orderly end, its lock."""

import dataclasses
import hashlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.backends.operations import (
    CreateModel,
    DeleteModel,
    ForwardBackward,
    LoadCheckpoint,
    LoadSnapshot,
    ModelOperation,
    OptimStep,
    Publish,
    Rejected,
    Sample,
    SaveCheckpoint,
)
from skyrl.errors import StorageError
from skyrl.tinker.channel import (
    Done,
    EngineChannel,
    Enqueue,
    FromEngine,
    Park,
    Parked,
    Progress,
    Revive,
    Running,
    Shutdown,
    Snapshotted,
    Stored,
    ToEngine,
)
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.engine import TinkerEngine
from skyrl.tinker.engine_lock import engine_lock
from skyrl.types import AdamParams, Datum, ErrorResponse, LoraConfig, ModelOutput, SamplingParams
from tests.fakes import POISON, FakeBackend, FakeConfig, FakeModel


class Bench:
    """An engine that is turned by hand, and the API's end of its channel."""

    def __init__(self, folder: Path, **options):
        self.config = EngineConfig(checkpoints_base=folder / "checkpoints", gap_timeout_s=60, **options)
        ours, its = socket.socketpair()
        ours.settimeout(30)
        self.channel, self._api = EngineChannel(its), EngineChannel(ours)
        self.backend = FakeBackend("fake", FakeConfig())
        self.engine = TinkerEngine(self.backend, self.channel, self.config)
        self.said: list[FromEngine] = []
        """All that it has said."""

    def turn(self, *frames: ToEngine) -> list[FromEngine]:
        """Deliver frames and turn once. Returns what the engine says."""
        for frame in frames:
            self.channel.deliver(frame)
        self.engine.turn()
        return self._hear()

    def rest(self, *frames: ToEngine) -> list[FromEngine]:
        """Deliver frames and turn until there is nothing to do and nothing left to write."""
        said = self.turn(*frames)
        while self.backend.busy or self.backend._background or self.backend._writer._left():
            self.backend._writer.submit(int).result()  # all that was handed over before is written, or cannot be
            said += self.turn()
            if not self.backend.busy and not self.backend._background:
                break
        return said + self.turn()

    def ask(self, *operations: ModelOperation, first: int = 0) -> list[FromEngine]:
        """Requests of one model, numbered from `first`; until they are done."""
        return self.rest(*self.enqueued(*operations, first=first))

    @staticmethod
    def enqueued(*operations: ModelOperation, first: int = 0) -> list[Enqueue]:
        return [
            Enqueue(operation.request_id, "tenant", operation, seq_id)
            for seq_id, operation in enumerate(operations, first)
        ]

    def end(self) -> list[FromEngine]:
        """An orderly end."""
        self.channel.deliver(Shutdown())
        self.engine.run()
        return self._hear()

    def close(self) -> None:
        """As a crash: what is in memory is gone."""
        self.channel.close()
        self._api.close()
        self.backend.close()

    def _hear(self) -> list[FromEngine]:
        self.channel.send(Progress("that is all"))
        said: list[FromEngine] = []
        while (frame := self._api.receive()) != Progress("that is all"):
            said.append(frame)  # pyright: ignore[reportArgumentType]
        self.said += said
        return said


@pytest.fixture
def bench(tmp_path) -> Iterator[Callable[..., Bench]]:
    """Makes engines, which share one folder of checkpoints."""
    made: list[Bench] = []

    def make(**options) -> Bench:
        made.append(Bench(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


NUMBERS = itertools.count()


def fresh(kind: str) -> str:
    return f"{kind}-{next(NUMBERS)}"


def create(model_id: str = "m") -> CreateModel:
    return CreateModel(request_id=fresh("create"), model_id=model_id, lora_config=LoraConfig(seed=1))


def a_pass(token: int = 1, model_id: str = "m") -> ForwardBackward:
    tokens = np.full(3, token, np.int32)
    data = [Datum(tokens, {"target_tokens": tokens.astype(np.int64)})]
    return ForwardBackward(request_id=fresh("pass"), model_id=model_id, data=data, loss_fn="cross_entropy")


def a_step(model_id: str = "m") -> OptimStep:
    return OptimStep(request_id=fresh("step"), model_id=model_id, adam_params=AdamParams(learning_rate=0.1))


def refused(gradients="incomplete", error: str = "too long", model_id: str = "m") -> Rejected:
    return Rejected(request_id=fresh("refused"), model_id=model_id, error=error, gradients=gradients)


def a_version(path: Path, version: str = "v", model_id: str = "m") -> Publish:
    return Publish(request_id=fresh("publish"), model_id=model_id, version=version, path=str(path), persist=False)


def a_sample(max_tokens: int = 3) -> Enqueue:
    params = SamplingParams(max_tokens=max_tokens, seed=0, stop=[])
    sample = Sample(request_id=fresh("sample"), version=None, prompt=np.asarray([1, 2], np.int32), params=params)
    return Enqueue(sample.request_id, "tenant", sample)


def of(kind: type, frames: Sequence[FromEngine]) -> list:
    return [frame for frame in frames if isinstance(frame, kind)]


def revival(snapshot: Snapshotted, *operations: ModelOperation, next_seq_id: int | None = None) -> Revive:
    first: list[ModelOperation] = [
        LoadSnapshot(request_id=fresh("revive"), model_id=snapshot.model_id, path=snapshot.path, digest=snapshot.digest)
    ]
    if snapshot.failed_pass is not None:
        first.append(refused(error=snapshot.failed_pass))
    following = snapshot.seq_id + 1 if next_seq_id is None else next_seq_id
    return Revive(snapshot.model_id, "tenant", following, [*first, *operations])


def same(one: FakeModel, other: FakeModel) -> bool:
    return one.to_files() == other.to_files()


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
    engine.backend._writer.submit(held.wait, 30)
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
    engine.backend._writer.submit(held.wait, 30)
    engine.turn(*engine.enqueued(create(), a_step()), Enqueue("delete", "tenant", delete))
    while engine.backend.busy:
        engine.turn()
    held.set()
    engine.rest()
    assert of(Done, engine.said)[-1] == Done("delete", ModelOutput("m")) and of(Snapshotted, engine.said) == []
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


KINDS = ["pass", "step", "bad pass", "refused pass", "save", "load", "publish"]


@settings(deadline=None, max_examples=60)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=14),
    turns=st.lists(st.integers(0, 40), min_size=1, max_size=3),
)
def test_a_model_whose_engine_is_lost_again_and_again_ends_as_one_whose_engine_never_was(
    kinds, turns, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("undisturbed")
    undisturbed = Bench(folder)
    undisturbed.ask(*requests(kinds, folder))
    results = {done.request_id: done.result for done in of(Done, undisturbed.said)}

    folder = tmp_path_factory.mktemp("lost")
    operations = requests(kinds, folder)
    answers: dict[str, object] = {}
    snapshot: Snapshotted | None = None
    for stop_after in [*turns, None]:
        engine = Bench(folder, snapshot_every_steps=2, snapshot_every_requests=5)
        said = _recover(engine, operations, answers, snapshot)
        if stop_after is None:
            said += engine.rest()
        for _ in range(stop_after or 0):
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
    missing = [
        Enqueue(operation.request_id, "tenant", operation, seq_id)
        for seq_id, operation in enumerate(operations)
        if seq_id >= following
    ]
    again = [operation for operation in operations[: covered + 1] if operation.request_id not in answers]
    for operation in again:  # saves whose files are there: the API finds them
        answers[operation.request_id] = "found on disk"
    if snapshot is None:
        frame = Revive("m", "tenant", following, repeated)
    else:
        frame = revival(snapshot, *repeated, next_seq_id=following)
    return engine.turn(frame, *missing)


def _told(result: object) -> object:
    """What of an answer does not depend on where its files are."""
    if isinstance(result, ErrorResponse):
        return result.gradients
    if dataclasses.is_dataclass(result) and hasattr(result, "metrics"):
        return result.metrics  # pyright: ignore[reportAttributeAccessIssue]
    return "done"


# -- parking -----------------------------------------------------------------------------------------------------------


def test_a_parked_model_is_snapshotted_then_gone_and_can_be_revived(bench):
    first = bench()
    first.ask(create(), a_pass(), a_step(), a_pass())
    parked = first.backend.models["m"]
    *_, snapshot, answer = [frame for frame in first.rest(Park("m")) if not isinstance(frame, Running)]
    assert answer == Parked("m", True) and isinstance(snapshot, Snapshotted) and snapshot.seq_id == 3
    assert not first.backend.has_model("m") and not first.engine.scheduler.knows("m")
    first.rest(revival(snapshot))
    assert same(first.backend.models["m"], parked)


def test_a_model_that_is_as_its_snapshot_is_parked_without_another(bench):
    engine = bench(snapshot_every_steps=1)
    engine.ask(create(), a_step())
    said = engine.rest(Park("m"))
    assert of(Snapshotted, said) == [] and of(Parked, said) == [Parked("m", True)]


def test_a_model_that_is_not_here_is_parked(bench):
    assert of(Parked, bench().rest(Park("m"))) == [Parked("m", True)]


def test_a_model_with_something_to_do_is_not_parked(bench):
    engine = bench()
    said = engine.turn(*engine.enqueued(create(), a_pass()), Park("m"))
    assert of(Parked, said) == [Parked("m", False)]
    engine.rest()
    assert engine.backend.has_model("m")


def test_a_model_that_holds_a_request_is_not_parked(bench):
    engine = bench()
    engine.ask(create())
    assert of(Parked, engine.rest(*engine.enqueued(a_pass(), first=2), Park("m"))) == [Parked("m", False)]


def test_a_request_that_arrives_while_its_model_is_being_parked_is_done(bench):
    engine = bench()
    engine.ask(create(), a_pass())
    step = a_step()
    said = engine.turn(Park("m")) + engine.ask(step, first=2)
    assert of(Parked, said) == [Parked("m", False)]
    assert step.request_id in [done.request_id for done in of(Done, said)] and engine.backend.models["m"].step == 1


def test_a_model_whose_snapshot_fails_is_not_parked(bench, tmp_path):
    engine = bench()
    engine.ask(create(), a_pass())
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    assert of(Parked, engine.rest(Park("m"))) == [Parked("m", False)]
    assert engine.backend.models["m"].gradient_sums is not None


# -- what runs ---------------------------------------------------------------------------------------------------------


def test_what_runs_is_told_before_each_piece_of_work_and_only_when_it_changes(bench):
    engine = bench()
    engine.ask(create())
    training, sample = a_pass(), a_sample(max_tokens=2)
    engine.said.clear()
    engine.rest(*engine.enqueued(training, first=1), sample)
    told = [frame.request_ids for frame in of(Running, engine.said)]
    one, other = (training.request_id,), (sample.request_id,)
    assert told[:4] == [one, other, one, other]
    assert all(before != after for before, after in itertools.pairwise(told))


def test_an_idle_engine_tells_that_nothing_runs_and_snapshots_are_nobodys_fault(bench):
    engine = bench(snapshot_every_steps=1)
    step = a_step()
    thread = threading.Thread(target=engine.engine.run)
    engine.channel.deliver(engine.enqueued(create())[0])
    engine.channel.deliver(engine.enqueued(step, first=1)[0])
    thread.start()
    told: list[FromEngine] = []
    while not (of(Snapshotted, told) and of(Running, told)[-1] == Running(())):
        told.append(engine._api.receive())  # pyright: ignore[reportArgumentType]
    engine.channel.deliver(Shutdown())
    thread.join(30)
    assert {name for frame in of(Running, told) for name in frame.request_ids} <= {
        done.request_id for done in of(Done, told)
    }


# -- its end -----------------------------------------------------------------------------------------------------------


def test_an_orderly_end_snapshots_what_has_changed_as_of_the_last_request_that_ended(bench):
    engine = bench()
    engine.ask(create("unchanged"), a_step("unchanged"))
    engine.rest(Park("unchanged"))
    engine.turn(*engine.enqueued(create(), a_pass(), a_step(), a_pass(), a_step()), a_sample(max_tokens=10**9))
    while engine.backend.models.get("m") is None or engine.backend.models["m"].step < 1:
        engine.turn()
    ended = engine.backend.models["m"]
    (snapshot,) = of(Snapshotted, engine.end())
    assert (snapshot.model_id, snapshot.seq_id) == ("m", 2)
    assert same(FakeModel.from_folder(snapshot.path, snapshot.digest), ended)


def test_an_orderly_end_reports_the_saves_that_were_being_written(bench, tmp_path):
    engine = bench()
    save = SaveCheckpoint(request_id="save", model_id="m", path=str(tmp_path / "save"))
    held = threading.Event()
    engine.backend._writer.submit(held.wait, 30)
    engine.turn(*engine.enqueued(create(), save))
    while engine.backend.busy:
        engine.turn()
    held.set()
    assert "save" in [done.request_id for done in of(Done, engine.end())]


def test_an_orderly_end_with_nothing_changed_writes_nothing(bench, tmp_path):
    engine = bench(snapshot_every_steps=1)
    engine.ask(create(), a_step())
    assert of(Snapshotted, engine.end()) == []


# -- one engine at a time ----------------------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from skyrl.tinker.engine_lock import engine_lock
with engine_lock(Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path) -> Iterator[subprocess.Popen]:
    """Another process that has the lock of `tmp_path`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_an_engine_does_not_start_where_another_one_writes(holder, tmp_path):
    said: list[str] = []
    with (
        pytest.raises(StorageError, match=r"\.engine\.lock is held by another engine"),
        engine_lock(tmp_path, said.append, patience_s=0.1),
    ):
        pass
    assert said == ["waiting for the engine before this one to end"]


def test_an_engine_starts_as_soon_as_the_one_before_it_is_gone(holder, tmp_path):
    with engine_lock(tmp_path, lambda message: os.kill(holder.pid, signal.SIGKILL)):
        assert holder.wait(30) == -signal.SIGKILL


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "checkpoints"
    with pytest.raises(StorageError, match=r"file/checkpoints"), engine_lock(folder, print):
        pass


def test_an_engine_in_the_middle_of_a_long_request_ends_at_once_when_the_api_is_gone(tmp_path):
    from skyrl.tinker.channel import Ready, Start

    config = EngineConfig(
        base_model="fake",
        backend="tests.fakes:FakeBackend",
        backend_config={"quanta_per_pass": 10**9},
        checkpoints_base=tmp_path,
    )
    ours, its = socket.socketpair()
    ours.settimeout(60)
    command = [sys.executable, "-m", "skyrl.tinker.engine", "--fd", str(its.fileno())]
    with subprocess.Popen(command, pass_fds=[its.fileno()]) as process:
        its.close()
        api = EngineChannel(ours)
        for frame in (Start(config), *Bench.enqueued(create(), training := a_pass())):
            api.send(frame)  # pyright: ignore[reportArgumentType]
        while not isinstance(frame := api.receive(), Ready):
            pass
        while frame != Running((training.request_id,)):
            frame = api.receive()
        api.close()
        assert process.wait(30) == 1
