"""Retention: which rows and files are removed or stay, and what clients are told; in a server and by skyrl gc."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.tinker.checkpoints.collector import Collector
from skyrl.tinker.checkpoints.retention import Rules
from skyrl.tinker.processes.messages import Park
from skyrl.utils.files.atomic_folders import write_folder
from tests.tinker.harness import LiveServer, loss_request, wait_until_ready
from tests.tinker.processes import ROOT, command
from tests.waiting import BOUND_S, until

LONG_AGO = 1000.0
DAY_S = 24 * 3600


class Server(LiveServer):
    """A server whose rounds a test runs, and whose rows it makes older."""

    def collect(self) -> list[str]:
        """Run a round. Returns what went, in words."""
        return [removal.what for removal in self.on_loop(self.app.state.server.service.disk.collect())]

    def sql(self, statement: str, *values: object) -> list[tuple]:
        with sqlite3.connect(self.folder / "server.db", timeout=30) as database:
            rows = database.execute(statement, values).fetchall()
        database.close()
        return rows

    @property
    def collector(self) -> Collector:
        return self.app.state.server.service.disk.collect.__self__

    def everything_later(self) -> None:
        """An hour passes before the next round looks at everything."""
        self.collector._seldom_at = 0.0

    def listens_since(self, when: float) -> None:
        """The server has been up, and able to hear its clients, since then."""
        self.collector._rules = Rules(self.config, heard_since=when)

    def save(self, model: str, seq_id: int, name: str, **options: object) -> str:
        body = {"model_id": model, "seq_id": seq_id, "path": name, **options}
        return self.run("/save_weights", body)["path"]

    def publish(self, model: str, seq_id: int, number: int = 1, **options: object) -> str:
        body = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": number, **options}
        return self.run("/save_weights_for_sampler", body)["sampling_session_id"]

    def written(self) -> None:
        """Wait until all versions without a name are on disk."""
        until(
            lambda: not self.sql("SELECT version FROM versions WHERE digest IS NULL"),
            "versions without a name are on disk",
        )

    def snapshots(self) -> list[str]:
        """Folders of the models' snapshots, once there is one."""
        query = "SELECT snapshot_folder FROM models WHERE snapshot_folder IS NOT NULL"
        return [folder for (folder,) in until(lambda: self.sql(query), "there is a snapshot")]

    def finish(self, session: str) -> None:
        assert self.post(f"/sessions/{session}/finish", {}).status_code == 204


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path, session_cleanup_interval_sec=-1, ephemeral_grace_sec=0) as server:
        wait_until_ready(server)
        yield server


def folders(server: Server, kind: str) -> list[str]:
    """Names of what is saved of any model."""
    return sorted(path.name for path in (server.folder / "checkpoints").glob(f"*/{kind}/*"))


def session_of(model: str) -> str:
    return model.partition(":")[0]


def failure_of_sample(server: Server, sampler: str, seq_id: int) -> str:
    return server.failure(server.submit_sample(sampler, seq_id)["request_id"])["error"]


# -- results and bodies -----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_old_results_go_and_a_repeated_request_is_still_told_apart(own_server):
    model = own_server.model()
    request = own_server.submit_pass(model, 1)
    own_server.outcome(request)
    own_server.sql("UPDATE results SET finished_at = ?", LONG_AGO)
    own_server.collect()
    assert own_server.sql("SELECT count(*) FROM results") == [(0,)]
    assert own_server.submit_pass(model, 1) == request


def test_client_of_an_old_result_is_told_what_went_and_not_to_send_it_again(own_server):
    request = own_server.submit_pass(own_server.model(), 1)
    own_server.outcome(request)
    own_server.sql("UPDATE results SET finished_at = ?", LONG_AGO)
    own_server.collect()
    own_server.app.state.server.queue.futures.drop(request)  # as in time others take its place in memory
    failure = own_server.failure(request)
    assert failure["category"] == "user" and "was done" in failure["error"]
    assert "result_retention_sec=86400" in failure["error"] and "max_results_gib=4" in failure["error"]


def put_results(server: Server, sizes: list[int], age_s: float) -> None:
    """Results of so many bytes, each older than the one before it, the first `age_s` seconds old."""
    for number, size in enumerate(sizes):
        server.sql(
            "INSERT INTO results (request_id, media_type, size_bytes, finished_at, body) VALUES (?, '', ?, ?, ?)",
            f"r{number}",
            size,
            time.time() - age_s - number,
            bytes(size),
        )


@pytest.mark.parametrize(
    ("sizes", "age_s", "kept"),
    [
        ([400, 400, 400], 700, ["r0", "r1"]),
        ([400, 400, 224], 700, ["r0", "r1", "r2"]),
        ([2000, 1, 1], 700, []),
        ([2000, 1, 1], 500, ["r0", "r1", "r2"]),
    ],
)
def test_results_past_their_bytes_go_the_oldest_first_but_none_of_the_last_ten_minutes(tmp_path, sizes, age_s, kept):
    with Server(tmp_path, session_cleanup_interval_sec=-1, max_results_gib=1024 / 2**30) as server:
        put_results(server, sizes, age_s)
        server.collect()
        left = server.sql("SELECT request_id FROM results ORDER BY 1")
        assert left == [(request,) for request in kept]


def put_bodies(server: Server, model: str) -> None:
    server.sql("UPDATE requests SET body = x'01' WHERE model_id = ?", model)


@pytest.mark.parametrize(
    ("status", "snapshot", "kept"),
    [
        ("live", None, [0, 1, 2]),
        ("live", 1, [2]),
        ("lost", None, [0, 1, 2]),
        ("lost", 1, [2]),
        ("failed", None, []),
        ("unloaded", 1, [2]),
    ],
)
def test_bodies_stay_as_long_as_a_revival_may_need_them(own_server, status, snapshot, kept):
    model = own_server.model()
    own_server.train(model, 1)
    put_bodies(own_server, model)
    own_server.sql("UPDATE models SET status = ?, snapshot_seq_id = ?", status, snapshot)
    own_server.collect()
    assert own_server.sql("SELECT seq_id FROM requests WHERE length(body) > 0 ORDER BY 1") == [(n,) for n in kept]


@pytest.mark.full
def test_bodies_of_failed_requests_go_and_of_pending_ones_stay(own_server):
    model = own_server.model()
    own_server.train(model, 1)
    put_bodies(own_server, model)
    own_server.sql("UPDATE requests SET status = 'failed' WHERE seq_id = 1")
    own_server.sql("UPDATE requests SET status = 'pending' WHERE seq_id = 2")
    own_server.sql("UPDATE models SET snapshot_seq_id = 2")
    own_server.collect()
    assert own_server.sql("SELECT seq_id FROM requests WHERE length(body) > 0") == [(2,)]


@pytest.mark.full
def test_custom_losses_go_with_the_log_of_their_session_although_a_checkpoint_is_kept(own_server):
    model = own_server.model()
    other = own_server.session()
    for session in (session_of(model), other):
        own_server.ok("/create_custom_loss", loss_request(session))
    own_server.save(model, 1, "kept")
    own_server.finish(session_of(model))
    own_server.sql("UPDATE sessions SET finished_at = ? WHERE finished_at IS NOT NULL", LONG_AGO)
    own_server.collect()
    assert own_server.sql("SELECT count(*) FROM requests") == [(0,)]
    assert own_server.sql("SELECT session_id FROM custom_losses") == [(other,)]
    assert own_server.sql("SELECT name FROM checkpoints") == [("kept",)]


def test_custom_losses_stay_while_a_request_of_their_session_is_logged(own_server):
    model = own_server.model()
    own_server.ok("/create_custom_loss", loss_request(session_of(model)))
    own_server.save(model, 1, "kept")
    own_server.finish(session_of(model))
    own_server.sql("UPDATE sessions SET finished_at = ?", LONG_AGO)
    own_server.sql("UPDATE requests SET status = 'pending' WHERE seq_id = 1")
    own_server.collect()
    assert own_server.sql("SELECT count(*) FROM custom_losses") == [(1,)]


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_expired_checkpoint_goes_with_its_files(own_server):
    model = own_server.model()
    path = own_server.save(model, 1, "a")
    own_server.save(model, 2, "b")
    own_server.sql("UPDATE checkpoints SET expires_at = ? WHERE name = 'a'", LONG_AGO)
    assert f"expired checkpoint {path}" in own_server.collect()
    assert folders(own_server, "weights") == ["b@2"]
    assert own_server.sql("SELECT name FROM checkpoints") == [("b",)]


def put_load(server: Server, model: str, folder: str) -> None:
    """A request that a revival would repeat."""
    server.sql(
        "INSERT INTO requests (request_id, kind, tenant, model_id, seq_id, decided, body, content_type, "
        "content_encoding, status, created_at) VALUES ('r', 'load_weights', 't', ?, 9, ?, x'01', '', '', 'done', 1)",
        model,
        json.dumps({"folder": folder}),
    )


@pytest.mark.full
def test_checkpoint_that_a_revival_would_load_again_outlives_its_time(own_server):
    model = own_server.model()
    own_server.save(model, 1, "a")
    [(folder,)] = own_server.sql("SELECT folder FROM checkpoints")
    own_server.sql("UPDATE checkpoints SET expires_at = ?", LONG_AGO)
    put_load(own_server, model, folder)
    own_server.collect()
    assert folders(own_server, "weights") == ["a@1"]
    own_server.sql("UPDATE models SET snapshot_seq_id = 9")
    own_server.collect()
    assert folders(own_server, "weights") == []


@pytest.mark.full
def test_sampler_of_an_expired_checkpoint_says_so(own_server):
    model = own_server.model()
    body = {"model_id": model, "seq_id": 1, "path": "a"}
    path = own_server.run("/save_weights_for_sampler", body)["path"]
    sampler = own_server.sampler(session_of(model), 1, model_path=path)
    own_server.sample(sampler, 1)
    own_server.sql("UPDATE checkpoints SET expires_at = ?", LONG_AGO)
    own_server.collect()
    assert f"{path} was deleted or has expired" in failure_of_sample(own_server, sampler, 2)


@pytest.mark.full
def test_only_the_newest_checkpoints_of_each_kind_are_kept_and_public_ones(tmp_path):
    with Server(tmp_path, session_cleanup_interval_sec=-1, keep_last_checkpoints=2) as server:
        wait_until_ready(server)
        model, other = server.model(), server.model()
        for seq_id, name in enumerate("abcd", 1):
            server.save(model, seq_id, name)
        server.sql("UPDATE checkpoints SET public = 1 WHERE name = 'a'")
        server.run("/save_weights_for_sampler", {"model_id": model, "seq_id": 5, "path": "s"})
        server.save(other, 1, "o")
        server.collect()
        assert folders(server, "weights") == ["a@1", "c@3", "d@4", "o@1"]
        assert folders(server, "sampler_weights") == ["s@5"]


# -- versions without a name ------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("kind", ["snapshot", "inflight"])
def test_version_goes_when_its_session_has_ended_and_its_sampler_says_so(own_server, kind):
    model = own_server.model()
    sampler = own_server.publish(model, 1, kind=kind)
    own_server.sample(sampler, 1)
    own_server.written()
    own_server.sql("UPDATE sessions SET finished_at = ?", time.time() - 10)
    own_server.collect()
    assert folders(own_server, "ephemeral") == [] and own_server.sql("SELECT * FROM versions") == []
    own_server.sql("UPDATE sessions SET finished_at = NULL")  # else the session's end is what a sample is told
    own_server.app.state.server.service.directory.forget(session_of(model))
    assert "kept for 0 seconds after their session" in failure_of_sample(own_server, sampler, 2)


@pytest.mark.full
def test_version_stays_for_the_grace_period(tmp_path):
    with Server(tmp_path, session_cleanup_interval_sec=-1, ephemeral_grace_sec=3600) as server:
        wait_until_ready(server)
        model = server.model()
        server.publish(model, 1)
        server.written()
        server.finish(session_of(model))
        server.collect()
        assert folders(server, "ephemeral") == ["1"]


def test_version_of_a_session_that_was_silent_for_a_day_goes_unless_the_server_was_down(own_server):
    model = own_server.model()
    own_server.publish(model, 1)
    own_server.written()
    own_server.collect()  # what was heard of until now is stored
    own_server.sql("UPDATE sessions SET created_at = ?, last_seen_at = ?", LONG_AGO, LONG_AGO)
    own_server.collect()
    assert folders(own_server, "ephemeral") == ["1"]
    own_server.listens_since(time.time() - 2 * DAY_S)
    own_server.collect()
    assert folders(own_server, "ephemeral") == []


def test_a_machine_that_slept_for_a_day_does_not_take_that_for_silence(own_server):
    model = own_server.model()
    own_server.publish(model, 1)
    own_server.written()
    own_server.collect()
    own_server.sql("UPDATE sessions SET created_at = ?, last_seen_at = ?", LONG_AGO, LONG_AGO)
    own_server.listens_since(time.time() - 2 * DAY_S)
    own_server.collector._last_round -= 25 * 3600  # its round before the sleep
    own_server.collect()
    own_server.collect()
    assert folders(own_server, "ephemeral") == ["1"]


def test_session_that_was_heard_of_a_moment_ago_is_not_taken_for_silent(own_server):
    model = own_server.model()
    own_server.publish(model, 1)
    own_server.written()
    own_server.sql("UPDATE sessions SET created_at = ?, last_seen_at = ?", LONG_AGO, LONG_AGO)
    own_server.listens_since(time.time() - 2 * DAY_S)
    own_server.collect()
    assert folders(own_server, "ephemeral") == ["1"]


def test_inflight_version_goes_when_a_newer_one_has_replaced_it(own_server):
    model = own_server.model()
    sampler = own_server.publish(model, 1, kind="inflight")
    own_server.publish(model, 2, number=2, kind="inflight")
    own_server.written()
    own_server.collect()
    assert folders(own_server, "ephemeral") == ["2"]
    assert own_server.sample(sampler, 1)


# -- sessions, snapshots, files without a name ------------------------------------------------------------------------


@pytest.mark.full
def test_rows_of_a_session_that_ended_long_ago_go_but_for_its_checkpoint_and_what_that_is_of(own_server):
    gone, kept = own_server.model(), own_server.model()
    own_server.train(gone, 1)
    own_server.save(kept, 1, "a")
    own_server.sql("UPDATE sessions SET finished_at = ?", LONG_AGO)
    own_server.everything_later()
    own_server.collect()
    assert own_server.sql("SELECT session_id FROM sessions") == [(session_of(kept),)]
    assert own_server.sql("SELECT model_id FROM models") == [(kept,)]
    assert own_server.sql("SELECT model_id FROM requests") == []
    assert own_server.http.get(f"/training_runs/{gone}").status_code == 404


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[tuple[Server, str, str]]:
    """(server, model with a snapshot and a checkpoint, path of that); its session was not finished."""
    options = {"session_cleanup_interval_sec": -1, "ephemeral_grace_sec": 0, "snapshot_every_steps": 1}
    with Server(tmp_path, **options) as server:
        wait_until_ready(server)
        model = server.model()
        seq_id = server.train(model, 1)
        path = server.save(model, seq_id, "a")
        server.snapshots()
        server.collect()  # what was heard of until now is stored
        yield server, model, path


def fall_silent(server: Server, days: float) -> None:
    """The server has been up, and its sessions have said nothing, for so long."""
    when = time.time() - days * DAY_S
    server.sql("UPDATE sessions SET created_at = ?, last_seen_at = ?", when, when)
    server.listens_since(when)
    server.everything_later()


def test_snapshot_and_requests_of_a_session_that_was_silent_for_a_month_go_and_its_checkpoint_stays(silent):
    server, _, path = silent
    fall_silent(server, 31.5)
    server.collect()
    assert folders(server, "snapshots") == [] and folders(server, "weights") == ["a@3"]
    assert server.sql("SELECT status, snapshot_folder FROM models") == [("expired", None)]
    assert server.sql("SELECT count(*) FROM requests") == [(0,)]
    assert [each["tinker_path"] for each in server.http.get("/checkpoints").json()["checkpoints"]] == [path]


@pytest.mark.full
def test_client_that_comes_back_too_late_is_told_which_checkpoint_to_load_and_can(silent):
    server, model, path = silent
    fall_silent(server, 31.5)
    server.collect()
    failure = server.failure(server.submit_pass(model, 4))
    assert failure["category"] == "user" and path in failure["error"] and "--session-retention-sec" in failure["error"]
    body = {"session_id": session_of(model), "model_seq_id": 1, "path": path, "optimizer": True}
    assert server.train(server.run("/load_weights", body)["model_id"], 1) == 3


@pytest.mark.parametrize(("days", "parked"), [(31.5, True), (30.5, False)])
def test_expired_models_leave_the_engine_also_where_silent_ones_are_not_parked(tmp_path, days, parked):
    with Server(tmp_path, session_cleanup_interval_sec=-1, session_timeout_sec=-1) as server:
        wait_until_ready(server)
        model = server.model()
        service = server.app.state.server.service
        service.activity._last_seen[session_of(model)] = time.time() - days * DAY_S

        async def park() -> None:
            server.app.state.server.queue.park()

        server.on_loop(park())
        assert (Park(model) in server.engine.sent) == parked


@pytest.mark.full
def test_model_of_a_session_that_was_silent_for_less_than_a_month_goes_on(silent):
    server, model, _ = silent
    fall_silent(server, 30.5)
    server.collect()
    assert len(folders(server, "snapshots")) == 1 and server.train(model, 4) == 6


def test_time_that_a_silent_session_can_go_on_is_an_option(tmp_path):
    with Server(tmp_path, session_cleanup_interval_sec=-1, session_retention_sec=3600) as server:
        wait_until_ready(server)
        model = server.model()
        server.save(model, 1, "a")
        server.collect()
        fall_silent(server, 1.1)
        server.collect()
        assert server.sql("SELECT status FROM models") == [("expired",)]


def test_silence_counts_soon_after_a_restart(silent):
    server, *_ = silent
    fall_silent(server, 31.5)
    server.listens_since(time.time() - 3500)
    server.collect()
    assert server.sql("SELECT status FROM models") == [("live",)]
    server.listens_since(time.time() - 3700)
    server.everything_later()
    server.collect()
    assert server.sql("SELECT status FROM models") == [("expired",)]


@pytest.mark.parametrize(
    "need",
    [
        "INSERT INTO versions (version, model_id, session_id, tenant, folder, created_at) "
        "SELECT model_id || '@9', model_id, session_id, 't', 'f', strftime('%s') FROM models",
        "UPDATE requests SET status = 'pending' WHERE seq_id = 2",
    ],
    ids=["a version that is not on disk", "a request that has not ended"],
)
def test_what_a_silent_session_has_yet_to_do_keeps_what_its_model_would_be_brought_back_from(silent, need):
    server, *_ = silent
    server.sql(need)
    fall_silent(server, 31.5)
    server.collect()
    assert len(folders(server, "snapshots")) == 1 and server.sql("SELECT status FROM models") == [("live",)]
    assert server.sql("SELECT count(*) FROM requests") == [(4,)]


def test_folders_that_hold_nothing_go_with_what_was_in_them(own_server):
    model = own_server.model()
    own_server.save(model, 1, "a")
    own_server.run("/save_weights_for_sampler", {"model_id": model, "seq_id": 2, "path": "s"})
    own_server.sql("UPDATE checkpoints SET expires_at = ? WHERE name = 'a'", LONG_AGO)
    own_server.collect()
    folder = own_server.folder / "checkpoints" / model.replace(":", "-")
    assert [path.name for path in folder.iterdir()] == ["sampler_weights"]
    own_server.sql("UPDATE checkpoints SET expires_at = ?", LONG_AGO)
    own_server.collect()
    assert not folder.exists()
    own_server.save(model, 3, "b")
    assert folders(own_server, "weights") == ["b@3"]


def folder_of(server: Server, model: str, kind: str, name: str, age_s: float) -> Path:
    path = server.folder / "checkpoints" / model.replace(":", "-") / kind / name
    write_folder(path, {"a": b"1"})
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def in_base(server: Server, path: Path) -> str:
    """Return the database's name of a folder."""
    return str(path.relative_to(server.folder / "checkpoints"))


@pytest.mark.full
def test_folders_without_a_name_go_after_an_hour(own_server):
    model = own_server.model()
    own_server.save(model, 1, "a")
    old = folder_of(own_server, model, "weights", "b@2", 4000)
    young = folder_of(own_server, model, "weights", "c@3", 3000)
    foreign = folder_of(own_server, model, "mine", "d", 4000)
    named = own_server.folder / "checkpoints" / model.replace(":", "-") / "weights" / "a@1"
    os.utime(named, (LONG_AGO, LONG_AGO))
    own_server.everything_later()
    own_server.collect()
    assert [path.exists() for path in (old, young, foreign, named)] == [False, True, True, True]


@pytest.mark.full
def test_folder_of_a_model_with_a_request_that_has_not_ended_stays(own_server):
    model = own_server.model()
    own_server.submit_pass(model, 5)  # waits for those before it
    path = folder_of(own_server, model, "weights", "b@2", 4000)
    own_server.everything_later()
    own_server.collect()
    assert path.exists()


@pytest.mark.parametrize(("days", "stays"), [(6, True), (8, False)])
def test_damaged_folder_stays_for_a_week(own_server, days, stays):
    path = folder_of(own_server, own_server.model(), "weights", ".b@2.0a1b2c3d.quarantined", days * DAY_S)
    own_server.everything_later()
    own_server.collect()
    assert path.exists() == stays


def test_snapshot_of_an_unloaded_model_goes(own_server):
    model = own_server.model()
    path = folder_of(own_server, model, "snapshots", "7", 0)
    own_server.sql("UPDATE models SET status = 'unloaded', snapshot_folder = ?", in_base(own_server, path))
    own_server.everything_later()
    own_server.collect()
    assert not path.exists() and own_server.sql("SELECT snapshot_folder FROM models") == [(None,)]


def test_snapshot_of_a_finished_session_goes_and_its_checkpoint_stays(tmp_path):
    options = {"session_cleanup_interval_sec": -1, "ephemeral_grace_sec": 0, "snapshot_every_steps": 1}
    with Server(tmp_path, **options) as server:
        wait_until_ready(server)
        model = server.model()
        server.save(model, server.train(model, 1), "a")
        server.snapshots()
        server.finish(session_of(model))
        server.sql("UPDATE sessions SET finished_at = ?", LONG_AGO)
        server.everything_later()
        server.collect()
        assert folders(server, "snapshots") == []
        assert server.sql("SELECT snapshot_folder, snapshot_bytes FROM models") == [(None, None)]
        assert server.sql("SELECT request_id FROM requests WHERE length(body) > 0") == []
        assert server.http.get(f"/training_runs/{model}/checkpoints").json()["checkpoints"]


@pytest.mark.parametrize(("finished", "loaded", "stays"), [(1, 0, False), (0, 0, True), (1, 1, True)])
def test_overwritten_checkpoint_goes_when_no_running_session_samples_it_and_no_revival_would_load_it(
    own_server, finished, loaded, stays
):
    model = own_server.model()
    samples = own_server.session()
    path = own_server.run("/save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "a"})["path"]
    sampler = own_server.sampler(samples, 0, model_path=path)
    own_server.sample(sampler, 1)
    [(folder,)] = own_server.sql("SELECT folder FROM checkpoints")
    own_server.sql("UPDATE checkpoints SET version = 'other', folder = 'other'")  # as a later save of that name does
    if loaded:
        put_load(own_server, model, folder)
    if finished:
        own_server.finish(samples)
        own_server.sql("UPDATE sessions SET finished_at = ? WHERE session_id = ?", time.time() - DAY_S, samples)
    own_server.collect()
    assert bool(folders(own_server, "sampler_weights")) == stays
    assert own_server.sql("SELECT folder FROM samplers") == [(folder if stays else None,)]


@pytest.mark.full
def test_space_in_the_database_is_given_back(own_server):
    own_server.sql("CREATE TABLE filler AS SELECT zeroblob(20000000) AS data")
    own_server.sql("DROP TABLE filler")
    own_server.everything_later()
    own_server.collect()
    own_server.sql("PRAGMA wal_checkpoint(TRUNCATE)")
    assert (own_server.folder / "server.db").stat().st_size < 2_000_000


# -- skyrl gc ---------------------------------------------------------------------------------------------------------


def gc(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = [option for option in command(folder)[3:] if "backend" not in option]
    run = [sys.executable, "-m", "skyrl.cli", "gc", *options, *arguments]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S)


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "server.db" not in path.name)


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """State of a server with an expired checkpoint, and a file without a name."""
    with Server(tmp_path) as server:
        wait_until_ready(server)
        model = server.model()
        server.save(model, 1, "a")
        server.save(model, 2, "b")
        server.sql("UPDATE checkpoints SET expires_at = ? WHERE name = 'a'", LONG_AGO)
        folder_of(server, model, "weights", "c@3", 4000)
        folder_of(server, model, "weights", ".0a.tmp", 4000)
    return tmp_path


@pytest.mark.full
def test_dry_run_of_gc_says_the_same_and_changes_nothing(stopped):
    with sqlite3.connect(stopped / "server.db") as database:
        before = tree(stopped), list(database.iterdump())
    database.close()
    dry = gc(stopped, "--dry-run")
    with sqlite3.connect(stopped / "server.db") as database:
        assert (tree(stopped), list(database.iterdump())) == before
    database.close()
    assert dry.stdout.splitlines()[-1].startswith("would remove ")
    removed = [line for line in gc(stopped).stdout.splitlines() if "database" not in line and ".tmp" not in line]
    assert [line for line in dry.stdout.splitlines() if ".tmp" not in line][:-1] == removed[:-1]
    assert any("expired checkpoint tinker://" in line for line in removed) and removed[-1].startswith("removed ")
    assert [path.name for path in (stopped / "checkpoints").glob("*/weights/*")] == ["b@2"]
