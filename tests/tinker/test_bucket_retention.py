"""Retention, trash and budgets of checkpoints in a bucket: they count its bytes, and what goes waits in it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyrl import cli
from skyrl.tinker.checkpoints import retention
from skyrl.utils.files.object_store import ObjectStore
from tests.buckets import Proxy, contents
from tests.tinker.harness import wait_until_ready
from tests.tinker.test_rest_checkpoints import listed, url
from tests.tinker.test_retention import LONG_AGO, Server, session_of


@contextmanager
def serving(folder: Path, bucket: str, **options: object) -> Iterator[Server]:
    given = {"session_cleanup_interval_sec": -1, "ephemeral_grace_sec": 0, **options}
    with Server(folder, checkpoints_base=f"{bucket}/server", **given) as server:
        wait_until_ready(server)
        yield server


def names(store: ObjectStore, trash: bool = False) -> list[str]:
    """KIND/NAME of the folders in the bucket, or of those in its trash."""
    keys = [key.split("/") for key in contents(store) if key.endswith("/manifest.json")]
    return sorted("/".join(key[-3:-1]) for key in keys if (key[0] == ".trash") == trash)


def expire(server: Server, name: str) -> None:
    server.sql("UPDATE checkpoints SET expires_at = ? WHERE name = ?", LONG_AGO, name)


def put_in_trash(store: ObjectStore, name: str, age_s: float, size_bytes: int = 10) -> None:
    when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() - age_s))
    entry = f".trash/{when}-{size_bytes}-0123abcd/model/weights/{name}"
    store.put(f"{entry}/a", b"x" * size_bytes)
    store.put(f"{entry}/manifest.json", b"{}")


@pytest.mark.full
def test_what_expires_or_is_surplus_goes_to_the_trash_of_the_bucket(tmp_path, bucket, store):
    with serving(tmp_path, bucket, keep_last_checkpoints=2) as server:
        model = server.model()
        paths = [server.save(model, seq_id, name) for seq_id, name in enumerate("abcd", 1)]
        expire(server, "d")
        server.collect()
        assert names(store) == ["weights/b@2", "weights/c@3"]
        assert names(store, trash=True) == ["weights/a@1", "weights/d@4"]
        assert [listed(server, path) is not None for path in paths] == [False, True, True, False]


def test_what_a_person_deletes_while_the_bucket_is_down_is_collected_later(
    tmp_path, bucket, store, s3_proxy: Proxy, monkeypatch
):
    monkeypatch.setattr(retention, "ORPHAN_AGE_S", -60)  # by the clock of the bucket
    monkeypatch.setenv("SKYRL_BUCKET_RETRY_S", "0.2")
    with serving(tmp_path, bucket) as server:
        path = server.save(server.model(), 1, "a")
        s3_proxy.trouble = lambda method, path: "refuse"
        assert server.http.delete(url(path)).status_code == 204
        s3_proxy.trouble = lambda method, path: None
        assert names(store) == ["weights/a@1"] and listed(server, path) is None
        server.everything_later()
        server.collect()
        assert names(store) == []


def test_the_trash_of_the_bucket_is_emptied_in_time(tmp_path, bucket, store):
    put_in_trash(store, "old", 8 * 24 * 3600)
    put_in_trash(store, "new", 60)
    with serving(tmp_path, bucket) as server:
        assert any("model/weights/old" in what for what in server.collect())
        assert names(store, trash=True) == ["weights/new"]


def test_what_has_no_name_goes_to_the_trash_and_what_is_half_goes_at_once(tmp_path, bucket, store, monkeypatch):
    monkeypatch.setattr(retention, "ORPHAN_AGE_S", -60)  # by the clock of the bucket
    with serving(tmp_path, bucket) as server:
        server.save(server.model(), 1, "a")
        other = "0" * 8 + "-0000-0000-0000-000000000000-train-0"
        store.put(f"{other}/weights/nameless@9/a", b"x")
        store.copy(next(key for key in contents(store) if key.endswith("manifest.json")), f"{other}/x")
        store.put(f"{other}/weights/half@9/a", b"x")
        store.put(
            f"{other}/weights/nameless@9/manifest.json",
            b'{"a": {"sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881", "bytes": 1}}',
        )
        server.everything_later()
        server.collect()
        assert names(store) == ["weights/a@1"]
        assert names(store, trash=True) == ["weights/nameless@9"]
        assert not any("half" in key for key in contents(store))


@pytest.mark.full
def test_bytes_of_bucket_and_trash_count_for_max_disk_gib(tmp_path, bucket, store):
    with serving(tmp_path, bucket, max_disk_gib=2000 / 2**30) as server:
        model = server.model()
        server.save(model, 1, "a")
        put_in_trash(store, "large", 60, size_bytes=1500)
        server.save(model, 2, "b")
        assert names(store, trash=True) == [], "the trash goes first"
        body = {"model_id": model, "path": "c"}
        failures = []
        for seq_id in range(3, 9):
            request = server.ok("/save_weights", {**body, "seq_id": seq_id, "path": f"c{seq_id}"})["request_id"]
            answer = server.outcome(request).json()
            failures += [answer["error"]] if "error" in answer else []
        stored = sum(len(data) for key, data in contents(store).items() if key.endswith("state.json"))
        assert failures and stored <= 2000 and "GiB of max_disk_gib=" in failures[0]


def test_versions_and_snapshots_of_an_ended_session_leave_the_bucket(tmp_path, bucket, store):
    with serving(tmp_path, bucket, snapshots_in_bucket=True, snapshot_every_steps=1) as server:
        model = server.model()
        server.publish(model, server.train(model, 1))
        server.written()
        server.snapshots()
        assert [name.partition("/")[0] for name in names(store)] == ["ephemeral", "snapshots"]
        server.finish(session_of(model))
        server.sql("UPDATE sessions SET finished_at = ?", LONG_AGO)
        server.everything_later()
        server.collect()
        assert names(store) == names(store, trash=True) == []


@pytest.mark.full
def test_gc_without_a_server_collects_in_the_bucket(tmp_path, bucket, store, capsys):
    with serving(tmp_path, bucket) as server:
        server.save(server.model(), 1, "a")
        server.save(server.model(), 1, "b")
        expire(server, "a")
    options = [f"--checkpoints-base={bucket}/server", f"--database-url=sqlite:///{tmp_path}/server.db"]
    assert cli.main(["gc", *options]) == 0
    assert "expired checkpoint" in capsys.readouterr().out
    assert names(store) == ["weights/b@1"] and names(store, trash=True) == ["weights/a@1"]


@pytest.mark.full
def test_a_bucket_that_is_down_keeps_its_files_and_the_round_goes_on(
    tmp_path, bucket, store, s3_proxy: Proxy, monkeypatch
):
    monkeypatch.setenv("SKYRL_BUCKET_RETRY_S", "0.1")
    with serving(tmp_path, bucket) as server:
        server.save(server.model(), 1, "a")
        server.model()
        expire(server, "a")
        s3_proxy.trouble = lambda method, path: "refuse"
        assert any("expired checkpoint" in what for what in server.collect())
        s3_proxy.trouble = lambda method, path: None
        assert names(store) == ["weights/a@1"]
        monkeypatch.setattr(retention, "ORPHAN_AGE_S", -60)
        server.everything_later()
        server.collect()
        assert names(store) == [] and names(store, trash=True) == ["weights/a@1"]
