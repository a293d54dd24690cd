"""Models that are put away, what the engine says it works on, and its orderly end."""

import dataclasses
import itertools
import threading
from collections import Counter

from skyrl.backends.operations import DeleteModel, SaveCheckpoint, SaveSnapshot
from skyrl.tinker.identity.ids import tenant_of_key
from skyrl.tinker.processes.messages import Done, Enqueue, FromEngine, Park, Parked, Running, Shutdown, Snapshotted
from tests.fakes import FakeConfig, FakeModel
from tests.tinker.engine_bench import a_pass, a_sample, a_step, create, of, revival, same

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
    one, other = (training.request_id,), (sample.operation.request_id,)
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
        told.append(engine.hear())
    engine.channel.deliver(Shutdown())
    thread.join(30)
    assert {name for frame in of(Running, told) for name in frame.request_ids} <= {
        done.request_id for done in of(Done, told)
    }


# -- in whose name -----------------------------------------------------------------------------------------------------


def test_what_the_engine_does_to_a_model_is_done_for_the_models_tenant(bench):
    engine = bench(snapshot_every_steps=1)
    asked = [dataclasses.replace(operation, tenant="t") for operation in (create(), a_step())]
    engine.turn(*engine.enqueued(*asked))
    while not (own := [operation for operation, _ in engine.engine.maintenance._own.values()]):
        engine.turn()
    engine.rest()
    engine.turn(Park("m"))
    own += [operation for operation, _ in engine.engine.maintenance._own.values()]
    assert [(type(operation), operation.tenant) for operation in own] == [(SaveSnapshot, "t"), (DeleteModel, "t")]


def test_samples_are_drawn_by_the_weights_of_tenants(bench):
    engine = bench(api_keys=["tml-heavy", "tml-light"], tenant_weights={"tml-heavy": 3})
    engine.backend.config = FakeConfig(rows=1)
    name, samples = {}, []
    for key in ("tml-heavy", "tml-light"):
        for _ in range(12):
            samples.append(dataclasses.replace(a_sample().operation, tenant=tenant_of_key(key.encode())))
            name[samples[-1].request_id] = key
    frames = engine.turn(*map(Enqueue, samples))
    for _ in range(12 * 3 - 1):  # a token in each turn
        frames += engine.turn()
    assert Counter(name[done.request_id] for done in of(Done, frames)) == {"tml-heavy": 9, "tml-light": 3}


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
    engine.backend._writer.submit("m", "held", lambda: held.wait(30))
    engine.turn(*engine.enqueued(create(), save))
    while engine.backend.busy:
        engine.turn()
    held.set()
    assert "save" in [done.request_id for done in of(Done, engine.end())]


def test_an_orderly_end_with_nothing_changed_writes_nothing(bench, tmp_path):
    engine = bench(snapshot_every_steps=1)
    engine.ask(create(), a_step())
    assert of(Snapshotted, engine.end()) == []
