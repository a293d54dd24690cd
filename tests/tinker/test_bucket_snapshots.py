"""Snapshots and unnamed versions in a bucket: a server continues on an empty machine as if nothing had happened."""

import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import ValidationError

from skyrl.cli import main
from skyrl.errors import RequestError
from skyrl.tinker.checkpoints import retention
from skyrl.tinker.checkpoints.state_locks import hold
from skyrl.tinker.config import EngineConfig
from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.files.paths import bucket_folder
from tests.buckets import Proxy, contents
from tests.tinker.harness import wait_until_ready
from tests.tinker.processes import running
from tests.tinker.test_api_checkpoints import load_as_new
from tests.tinker.test_durability import Script, undisturbed  # noqa: F401 (a fixture)
from tests.tinker.test_retention import Server
from tests.waiting import until


@pytest.fixture
def other_machine(monkeypatch, tmp_path) -> Callable[[], None]:
    """Call to lose all that is on this machine's disk but the database."""
    machines: list[Path] = []

    def move() -> None:
        if machines:
            shutil.rmtree(machines[-1])
        machines.append(tmp_path / f"machine-{len(machines)}")
        machines[-1].mkdir()
        monkeypatch.setenv("SKYRL_DATA", str(machines[-1]))

    return move


def options_of(bucket: str, **options) -> dict:
    return {"checkpoints_base": f"{bucket}/server", "snapshots_in_bucket": True, **options}


def server_of(folder: Path, bucket: str, **options) -> Server:
    return Server(folder, **options_of(bucket, session_cleanup_interval_sec=-1, **options))


def kinds(store: ObjectStore) -> set[str]:
    """KIND of each whole folder in the bucket, and names of what is beside the models."""
    keys = [key.split("/") for key in contents(store)]
    return {key[1] if len(key) > 1 else key[0] for key in keys if key[-1] == "manifest.json" or len(key) == 1}


def on_disk(bucket: str) -> set[str]:
    folder = bucket_folder(f"{bucket}/server")
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {
        ".server.lock",
        ".engine.lock",
        ".running",
        ".crashes.json",
    }


def trained(server: Server) -> tuple[str, str, int]:
    """A trained model, a sampler of it, and the next seq_id."""
    wait_until_ready(server)
    model = server.model()
    seq_id = server.train(model, 1)
    return model, server.publish(model, seq_id), seq_id + 1


def test_all_that_is_saved_is_in_the_bucket_and_nothing_on_the_disk(tmp_path, bucket, store):
    with server_of(tmp_path, bucket) as server:
        model, _, seq_id = trained(server)
        server.save(model, seq_id, "a")
    assert kinds(store) == {"weights", "ephemeral", "snapshots", ".state-id"}
    assert on_disk(bucket) == set()


@pytest.mark.full
@pytest.mark.parametrize("often", [True, False])
def test_a_server_moved_to_empty_machines_changes_no_outcome(tmp_path, bucket, other_machine, undisturbed, often):  # noqa: F811
    """It is killed each time, with requests under way."""
    other_machine()
    with server_of(tmp_path, bucket, snapshot_every_steps=1 if often else 10) as server:
        wait_until_ready(server)
        script = Script(server)
        for place in range(5):
            for _ in range(4):
                script.submit()
            if place % 2:
                script.await_last()
            server.crash()
            server.__exit__()
            other_machine()
            server.__enter__()
            wait_until_ready(server)
        assert not script.submit() and script.finish() == undisturbed


@pytest.mark.full
def test_a_snapshot_that_was_replaced_leaves_the_bucket(tmp_path, bucket, store):
    with server_of(tmp_path, bucket, snapshot_every_steps=1) as server:
        wait_until_ready(server)
        model = server.model()
        for seq_id in (1, 3, 5):
            server.train(model, seq_id)

        def there() -> set[str]:
            return {key.rpartition("/")[0] for key in contents(store) if "/snapshots/" in key}

        def only_the_newest() -> bool:
            (newest,) = server.snapshots()
            return "/snapshots/6-" in newest and there() == {newest}

        until(only_the_newest, "only the newest is in the bucket")


@pytest.mark.full
def test_models_wait_for_a_bucket_that_does_not_answer_and_lose_nothing(tmp_path, bucket, s3_proxy: Proxy, monkeypatch):
    monkeypatch.setenv("SKYRL_BUCKET_RETRY_S", "0.1")
    with server_of(tmp_path, bucket) as server:
        model, _, seq_id = trained(server)
        wanted = server.logprobs(model, seq_id)
    with server_of(tmp_path, bucket) as server:
        wait_until_ready(server)
        s3_proxy.trouble = lambda method, path: "refuse" if "/snapshots/" in path else None
        asked = len(s3_proxy.seen)
        request = server.submit_pass(model, seq_id + 1, forward_only=True)
        until(lambda: sum("/snapshots/" in seen for seen in s3_proxy.seen[asked:]) > 4, "it was asked and refused")
        assert server.poll(request).status_code == 408
        s3_proxy.trouble = lambda method, path: None
        server.pass_result(request)
        assert server.logprobs(model, seq_id + 2) == wanted


def test_a_bucket_that_fails_while_a_snapshot_is_read_does_not_lose_the_model(
    tmp_path, bucket, s3_proxy: Proxy, monkeypatch
):
    monkeypatch.setenv("SKYRL_BUCKET_RETRY_S", "0.1")
    with server_of(tmp_path, bucket) as server:
        model, _, seq_id = trained(server)
        wanted = server.logprobs(model, seq_id)
    with server_of(tmp_path, bucket) as server:
        wait_until_ready(server)
        s3_proxy.trouble = lambda method, path: (
            "refuse" if "/snapshots/" in path and method == "GET" and "manifest" not in path else None
        )
        error = server.failure(server.submit_pass(model, seq_id + 1, forward_only=True))["error"]
        assert "could not be repeated" in error
        s3_proxy.trouble = lambda method, path: None
        assert server.logprobs(model, seq_id + 2) == wanted


@pytest.mark.full
def test_training_goes_on_while_no_snapshot_can_be_sent(tmp_path, bucket, store, s3_proxy: Proxy, monkeypatch):
    monkeypatch.setenv("SKYRL_BUCKET_RETRY_S", "0.1")
    with server_of(tmp_path, bucket, snapshot_every_steps=1) as server:
        wait_until_ready(server)
        model = server.model()
        s3_proxy.trouble = lambda method, path: "refuse" if "/snapshots/" in path else None
        for seq_id in (1, 3, 5):
            server.train(model, seq_id)
        wanted = server.logprobs(model, 7)
        server.crash()
        s3_proxy.trouble = lambda method, path: None
        server.recover()
        assert server.logprobs(model, 8) == wanted


@pytest.mark.full
def test_a_snapshot_without_a_name_is_collected(tmp_path, bucket, store, monkeypatch):
    monkeypatch.setattr(retention, "ORPHAN_AGE_S", -60)  # by the clock of the bucket
    other = "0" * 8 + "-0000-0000-0000-000000000000-train-0"
    with server_of(tmp_path, bucket) as server:
        _, sampler, _ = trained(server)
        server.written()
        store.put(f"{other}/snapshots/9-ab/a", b"x")
        server.everything_later()
        server.collect()
        assert not any("/snapshots/9-ab/" in key for key in contents(store))
        assert "ephemeral" in kinds(store)
        server.sample(sampler, 1)


# -- from the disk to the bucket --------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("killed", [False, True])
def test_snapshots_move_to_the_bucket_when_the_option_is_first_set(tmp_path, bucket, store, killed):
    points = tmp_path / "points"
    points.mkdir()
    with Server(tmp_path, checkpoints_base=f"{bucket}/server", session_cleanup_interval_sec=-1) as server:
        model, sampler, seq_id = trained(server)
        wanted, tokens = server.logprobs(model, seq_id), server.sample(sampler, 1)
    assert kinds(store) == set() and any("/snapshots/" in file for file in on_disk(bucket))
    if killed:
        point = points / "start: snapshots in the bucket, state id on disk"
        point.touch()
        options = options_of(bucket, snapshots_in_bucket="true")
        with running(tmp_path, env={"SKYRL_CRASH_POINTS": str(points)}, **options) as server:
            assert not point.exists()
            server.end(signal.SIGTERM)
    with server_of(tmp_path, bucket) as server:
        wait_until_ready(server)
        assert server.logprobs(model, seq_id + 1) == wanted
        assert server.sample(sampler, 2) == tokens
        assert kinds(store) >= {"ephemeral", "snapshots", ".state-id"} and on_disk(bucket) == set()


def test_a_server_without_the_option_is_refused_where_snapshots_are_in_the_bucket(tmp_path, bucket):
    with server_of(tmp_path, bucket) as server:
        trained(server)
    with pytest.raises(RequestError, match=r"its snapshots are in the bucket.*start with --snapshots-in-bucket"):
        hold(EngineConfig(checkpoints_base=f"{bucket}/server"))


@pytest.mark.full
def test_a_bucket_and_the_database_of_another_server_do_not_belong_together(tmp_path, bucket, capsys):
    for name in ("server", "other"):
        with Server(tmp_path / name, **options_of(bucket, checkpoints_base=f"{bucket}/{name}")) as server:
            trained(server)
    options = ["--snapshots-in-bucket", f"--checkpoints-base={bucket}/server"]
    assert main(["gc", *options, f"--database-url=sqlite:///{tmp_path}/other/server.db"]) != 0
    assert f"checkpoints_base={bucket}/server and database_url" in capsys.readouterr().err


def test_a_folder_has_no_bucket_for_snapshots(tmp_path):
    with pytest.raises(ValidationError, match=r"snapshots_in_bucket: checkpoints_base=.* is a folder; set"):
        EngineConfig(checkpoints_base=tmp_path, snapshots_in_bucket=True)


@pytest.mark.full
def test_a_database_that_is_older_than_the_snapshots_loses_their_models_and_no_checkpoint(tmp_path, bucket, store):
    (tmp_path / "older").mkdir()
    with server_of(tmp_path, bucket, snapshot_every_steps=1) as server:
        model, _, seq_id = trained(server)
        path = server.save(model, seq_id, "a")
        before = server.snapshots()
        files = [tmp_path / "server.db", tmp_path / "older" / "server.db"]
        with closing(sqlite3.connect(files[0])) as database, closing(sqlite3.connect(files[1])) as copy:
            database.backup(copy)
        server.train(model, seq_id + 1)
        until(lambda: not any(before[0] in key for key in contents(store)), "that snapshot was replaced")
    with server_of(tmp_path / "older", bucket) as server:
        wait_until_ready(server)
        error = server.failure(server.submit_pass(model, seq_id + 1))["error"]
        assert "cannot be recovered" in error and "is missing" in error
        assert server.result(load_as_new(server, path))["model_id"]


@pytest.mark.full
def test_a_backup_has_the_database_and_says_what_is_not_in_it(tmp_path, bucket, capsys):
    with server_of(tmp_path, bucket) as server:
        model, _, seq_id = trained(server)
        server.save(model, seq_id, "a")
    options = ["--snapshots-in-bucket", f"--checkpoints-base={bucket}/server"]
    database = f"--database-url=sqlite:///{tmp_path}/server.db"
    assert main(["backup", *options, database, f"--to={tmp_path}/backup"]) == 0
    assert f"what is in {bucket}/server is not copied" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "backup").rglob("*") if path.is_file()] == ["tinker.db"]
