"""Usage in the ledger: whatever ends meanwhile, it is what clients were answered, and once."""

import asyncio
import threading
import time
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlmodel import Session, select

from skyrl.errors import RequestError
from skyrl.tinker.database.database import Database
from skyrl.tinker.database.ledger import billing, sample_charges
from skyrl.tinker.database.ledger.billing import Window
from skyrl.tinker.database.ledger.charges import HOUR_S, Charge
from skyrl.tinker.database.ledger.sample_charges import SampleCharges
from skyrl.tinker.database.tables import ChargedSampleRow, CheckpointRow, UsageRow
from skyrl.tinker.identity.callers import Caller
from tests.fakes import ACTIVE_PARAMETERS
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.test_api_checkpoints import save
from tests.tinker.test_rest_checkpoints import url
from tests.waiting import BOUND_S, until

TOKENS = [1, 2, 3, 4, 5]


def window() -> dict[str, str]:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return {
        "starting_on": (now - timedelta(hours=1)).isoformat(),
        "ending_before": (now + timedelta(hours=2)).isoformat(),
    }


def usage(server: LiveServer, key: str = "tml-test") -> list[dict[str, Any]]:
    response = server.http.get("/billing/usage/events", params=window(), headers={"X-API-Key": key})
    assert response.status_code == 200, response.text
    return response.json()["data"]


def tokens(server: LiveServer, kind: str, **also: Any) -> int:
    infos = [event["event_info"] for event in usage(server)]
    return sum(info["token_count"] for info in infos if info["type"] == kind and also.items() <= info.items())


def samples(server: LiveServer) -> int:
    return sum(event["event_info"].get("sample_count", 0) for event in usage(server))


def test_tokens_of_passes_are_those_that_were_sent(server):
    model = server.model()
    server.train(model, 1, TOKENS)
    server.logprobs(model, 3)
    events = [event for event in usage(server) if event["training_run_id"] == model]
    trained = next(event for event in events if event["event_info"].get("forward_only") is False)
    assert trained["event_info"]["token_count"] == len(TOKENS)
    assert trained["flops"] == 6 * ACTIVE_PARAMETERS * len(TOKENS)
    assert trained["device_seconds"] > 0


def test_samples_in_the_ledger_are_the_sequences_that_were_answered(server):
    sampler = server.sampler(server.session(), 0, base_model="fake/model")
    before = samples(server)
    server.sample(sampler, 0, num_samples=2)
    server.sample(sampler, 1, num_samples=3)
    assert samples(server) - before == 5


def test_a_failed_pass_is_not_charged(server):
    model = server.model()
    before = tokens(server, "training")
    server.failure(server.submit_pass(model, 1, [1, 10**6]))
    assert tokens(server, "training") == before


def test_passes_that_a_new_engine_repeats_are_charged_once(tmp_path):
    with LiveServer(tmp_path, snapshot_every_steps=1000) as server:
        wait_until_ready(server)
        model = server.model()
        place = server.train(model, 1, TOKENS)
        server.crash()
        server.recover()
        server.train(model, place, TOKENS)
        assert tokens(server, "training", forward_only=False) == 2 * len(TOKENS)


def test_a_key_reads_of_itself_alone(tmp_path):
    with LiveServer(tmp_path, api_keys=["tml-a", "tml-test"]) as server:
        wait_until_ready(server)
        server.http.headers["X-API-Key"] = "tml-test"
        server.train(server.model(), 1, TOKENS)
        assert usage(server, "tml-a") == [] and usage(server) != []


def test_saves_are_in_the_audit_log_and_in_storage(server):
    model = server.model()
    path = server.result(save(server, model, 1, "kept"))["path"]
    entries = server.http.get("/audit", params={"event_type": "checkpoints"}).json()["entries"]
    assert ("checkpoint_create", path) in [(entry["event"], entry["tinker_path"]) for entry in entries]
    (stored,) = server.http.get("/billing/usage/checkpoints/current").json()["data"]
    assert stored["checkpoint_count"] >= 1 and stored["size_bytes"] > 0


def test_a_window_that_begins_within_an_hour_is_refused_by_name(server):
    query = window() | {"starting_on": "2026-01-01T00:30:00Z"}
    response = server.http.get("/billing/usage/events", params=query)
    assert response.status_code == 400 and "starting_on=2026-01-01T00:30" in response.json()["detail"]


@pytest.mark.full
def test_a_sample_that_is_sent_again_is_charged_what_it_was_answered_last(tmp_path):
    """After the loss of an answer that was not retrieved: the same place of the same sampler, and other tokens."""
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        session = server.session()
        sampler = server.sampler(session, 0, base_model="fake/model")
        wait_for_answer(server, server.submit_sample(sampler, 0)["request_id"])
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        again = server.sample(sampler, 0, num_samples=3)
        other = server.sample(sampler, 1)
        assert tokens(server, "sampling_sample") == sum(map(len, again + other))
        assert tokens(server, "sampling_prefill") == 2 * 3


def wait_for_answer(server: LiveServer, request_id: str) -> None:
    """Wait until a sample has an answer, which is not retrieved."""
    futures = server.app.state.server.queue.futures
    until(lambda: futures.get(request_id).outcome is not None, "the sample has an answer")


def forget(server: LiveServer, request_id: str) -> None:
    """Drop a sample's answer, as where there are too many."""
    wait_for_answer(server, request_id)
    futures = server.app.state.server.queue.futures
    server.engine.loop.call_soon_threadsafe(futures.drop, request_id)


def test_a_sample_that_its_client_is_told_is_gone_was_not_charged(own_server):
    sampler = own_server.sampler(own_server.session(), 0, base_model="fake/model")
    request_id = own_server.submit_sample(sampler, 0)["request_id"]
    forget(own_server, request_id)
    assert own_server.outcome(request_id).status_code == 410
    answered = own_server.sample(sampler, 1)  # which is how the SDK sends it again
    assert tokens(own_server, "sampling_sample") == sum(map(len, answered))
    assert tokens(own_server, "sampling_prefill") == 3
    assert samples(own_server) == len(answered)


@pytest.mark.parametrize("in_between", [0, 2])
def test_a_sample_whose_answer_was_handed_out_stays_charged(own_server, in_between):
    """The database has been told that it was, which is done with later charges, or has not."""
    sampler = own_server.sampler(own_server.session(), 0, base_model="fake/model")
    request_id = own_server.submit_sample(sampler, 0)["request_id"]
    own_server.outcome(request_id)
    for number in range(in_between):
        own_server.sample(sampler, 1 + number)
    used = tokens(own_server, "sampling_sample")
    forget(own_server, request_id)
    assert own_server.outcome(request_id).status_code == 410
    assert tokens(own_server, "sampling_sample") == used > 0


def test_nobody_takes_back_what_another_key_was_charged(ledger):
    sample_charges.charge_samples(ledger, {"sample-0": Charge("s", "", "key-a", "m", None, sampled_tokens=5)})
    sample_charges.take_back(ledger, "sample-0", Caller("key-b"))
    assert ledger.exec(select(UsageRow.sampled_tokens)).one() == 5
    sample_charges.take_back(ledger, "sample-0", Caller("key-a"))
    assert ledger.exec(select(UsageRow.sampled_tokens)).one() == 0


def test_what_samples_were_charged_is_forgotten_after_an_hour_or_two(ledger, monkeypatch):
    for hour, name in enumerate(["old", "recent", "now"]):
        monkeypatch.setattr(time, "time", lambda hour=hour: 1.8e9 + 3600 * hour)
        sample_charges.charge_samples(ledger, {name: Charge("s", "", "t", "m", None, sampled_tokens=5)})
    sample_charges.settle_old(ledger)
    kept = ledger.exec(select(ChargedSampleRow.request_id).order_by(ChargedSampleRow.hour)).all()
    assert kept == ["recent", "now"]


def test_a_sample_that_is_charged_again_in_a_later_hour_leaves_the_earlier_one(ledger, monkeypatch):
    charge = Charge("s", "", "t", "m", None, prefill_tokens=2, sampled_tokens=5, samples=3, sampling_s=0.5)
    monkeypatch.setattr(time, "time", lambda: 1.8e9)
    sample_charges.charge_samples(ledger, {"sample-0": charge, "sample-1": charge})
    monkeypatch.setattr(time, "time", lambda: 1.8e9 + 3600)
    sample_charges.charge_samples(ledger, {"sample-0": replace(charge, sampled_tokens=7, samples=4)})
    rows = ledger.exec(select(UsageRow).order_by(UsageRow.hour)).all()
    amounts = [(row.requests, row.prefill_tokens, row.sampled_tokens, row.samples, row.sampling_s) for row in rows]
    assert amounts == [(1, 2, 5, 3, 0.5), (1, 2, 7, 4, 0.5)]


@pytest.mark.full
def test_storing_charges_of_samples_again_changes_nothing(ledger):
    charges = {f"sample-{n}": Charge("s", "", "t", "m", None, sampled_tokens=n) for n in range(1200)}
    for _ in range(2):  # the answer to the first may have been lost
        sample_charges.charge_samples(ledger, charges)
    (row,) = ledger.exec(select(UsageRow)).all()
    assert (row.requests, row.sampled_tokens) == (1200, sum(range(1200)))


SAMPLED = Charge("s", "", "t", "m", None, sampled_tokens=5)


def unretrieved(database: Database) -> list[str]:
    """Samples whose charges would be refunded if their clients were told that the answers are lost."""
    return list(database.read_now(lambda session: session.exec(select(ChargedSampleRow.request_id)).all()))


def test_a_sample_waits_for_its_charge_while_the_database_is_busy(tmp_path):
    busy_s = 1.2
    with closing(Database(f"sqlite:///{tmp_path / 'server.db'}")) as database:

        async def charge() -> list[str]:
            released = threading.Event()
            busy = asyncio.create_task(database.write(lambda session: released.wait(BOUND_S)))
            asyncio.get_running_loop().call_later(busy_s, released.set)
            await SampleCharges(database).store("sample-0", SAMPLED)
            found = unretrieved(database)
            released.set()
            await busy
            return found

        assert asyncio.run(charge()) == ["sample-0"]


def test_an_idle_server_records_that_an_answer_was_handed_out(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_charges, "RECORD_S", 0.0)
    with closing(Database(f"sqlite:///{tmp_path / 'server.db'}")) as database:

        async def hand_out() -> None:
            charges = SampleCharges(database)
            await charges.store("sample-0", SAMPLED)
            charges.handed_out("sample-0")
            await asyncio.to_thread(until, lambda: not unretrieved(database), "the delivery is recorded")

        asyncio.run(hand_out())


def test_a_server_that_stops_records_that_answers_were_handed_out(tmp_path):
    with closing(Database(f"sqlite:///{tmp_path / 'server.db'}")) as database:

        async def hand_out() -> None:
            charges = SampleCharges(database)
            await charges.store("sample-0", SAMPLED)
            charges.handed_out("sample-0")
            await charges.drain()

        asyncio.run(hand_out())
        assert unretrieved(database) == []


def test_what_a_session_used_moves_with_it_to_another_project(server):
    session = server.session()
    model = server.model(session)
    place = server.train(model, 1, TOKENS)
    moved = server.http.put(f"/sessions/{session}/project", json={"project_id": "moved-to"})
    assert moved.status_code == 204
    server.train(model, place, TOKENS)  # what it uses from then on, too
    events = [event for event in usage(server) if event.get("training_run_id") == model]
    trained = [event for event in events if event["event_info"].get("forward_only") is False]
    assert [(event["project_id"], event["event_info"]["token_count"]) for event in trained] == [("moved-to", 10)]


def test_checkpoints_of_a_session_move_with_it_to_another_project(server):
    """Those that are kept, and the storage of one that was deleted."""
    session = server.session()
    model = server.model(session)
    server.result(save(server, model, 1, "kept"))
    path = server.result(save(server, model, 2, "deleted"))["path"]
    assert server.http.delete(url(path)).status_code == 204
    assert server.http.put(f"/sessions/{session}/project", json={"project_id": "moved-to"}).status_code == 204
    events = [event for event in usage(server) if event.get("training_run_id") == model]
    assert {event["event_info"]["type"] for event in events} == {"checkpoint", "storage"}
    assert {event["project_id"] for event in events} == {"moved-to"}


DAY_S = 24 * HOUR_S
BEGIN = 1_800_000_000 // HOUR_S * HOUR_S


def events(ledger: Session, hours: int, now: float = BEGIN + DAY_S) -> list[Any]:
    return billing.usage(ledger, Caller("t"), Window(BEGIN, BEGIN + hours * HOUR_S), now).data


def keep(ledger: Session, created_at: float) -> None:
    """Add a checkpoint of 2 GB."""
    about = {"tenant": "t", "base_model": "m", "lora_config": {}, "digest": "d"}
    ledger.add(
        CheckpointRow(
            model_id="s:train:0", kind="weights", name="c", version="v", folder="f", size_bytes=2 * 10**9,
            created_at=created_at, **about
        )
    )  # fmt: skip


def test_storage_is_counted_by_the_hour_for_the_time_that_it_lasts(ledger):
    keep(ledger, BEGIN + 1.5 * HOUR_S)
    found = [
        ((event.bucket_start.timestamp() - BEGIN) / HOUR_S, event.event_info.gigabyte_hours)
        for event in events(ledger, 24, now=BEGIN + 3.25 * HOUR_S)
    ]
    assert found == [(1, 1.0), (2, 2.0), (3, 0.5)]


def test_usage_of_more_events_than_an_answer_has_is_refused_with_a_shorter_window(ledger, monkeypatch):
    keep(ledger, BEGIN)
    for hour in range(2):
        amounts = {"trained_tokens": 1, "prefill_tokens": 1, "samples": 1, "sampled_tokens": 1}
        ledger.add(
            UsageRow(session_id="s", model_id="m", hour=BEGIN + hour * HOUR_S, tenant="t", base_model="m", **amounts)
        )
    assert len(events(ledger, 12)) == 12 + 2 * 3
    monkeypatch.setattr(billing, "MOST_EVENTS", 17)
    with pytest.raises(RequestError, match=r"ending_before=.* 18 usage events, and 17 .* windows of 11 hours"):
        events(ledger, 12)
    monkeypatch.setattr(billing, "MOST_EVENTS", 0)
    assert len(events(ledger, 1)) == 4  # as there is no shorter window
