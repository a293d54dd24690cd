"""Collected files wait in .trash for a while; what would take too much of all is left; and there is a way back."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyrl import cli
from skyrl.tinker.checkpoints.disk_budget import MIB
from skyrl.tinker.checkpoints.guard import RemovalPlan
from tests.tinker.harness import wait_until_ready
from tests.tinker.test_retention import DAY_S, LONG_AGO, Server, folder_of, folders


@contextmanager
def serving(folder: Path, **options: object) -> Iterator[Server]:
    with Server(folder, session_cleanup_interval_sec=-1, ephemeral_grace_sec=0, **options) as server:
        wait_until_ready(server)
        yield server


def trash(folder: Path) -> list[str]:
    """KIND/NAME of what is in the trash of a server."""
    entries = (folder / "checkpoints" / ".trash").glob("*/*/*/*")
    return sorted("/".join(entry.parts[-2:]) for entry in entries)


def put(folder: Path, name: str, age_s: float, size_bytes: int = 10) -> None:
    """Something that has been in the trash for so long."""
    when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() - age_s))
    path = folder / "checkpoints" / ".trash" / f"{when}-{size_bytes}-0123abcd" / "model" / "weights" / name
    path.mkdir(parents=True)
    (path / "a").write_bytes(b"x" * size_bytes)


def expire(server: Server, *names: str) -> None:
    for name in names:
        server.sql("UPDATE checkpoints SET expires_at = ? WHERE name = ?", LONG_AGO, name)


# -- what goes there --------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_what_expires_is_surplus_or_has_no_name_goes_to_the_trash(tmp_path):
    with serving(tmp_path, keep_last_checkpoints=2) as server:
        model = server.model()
        for seq_id, name in enumerate("abcd", 1):
            server.save(model, seq_id, name)
        expire(server, "d")
        folder_of(server, model, "weights", "nameless@9", 4000)
        folder_of(server, model, "weights", ".half.tmp", 4000)
        server.collect()
        assert folders(server, "weights") == ["b@2", "c@3"]
        assert trash(tmp_path) == ["weights/a@1", "weights/d@4", "weights/nameless@9"]


def test_what_a_person_deletes_or_overwrites_and_what_a_session_leaves_goes_at_once(tmp_path):
    with serving(tmp_path) as server:
        model = server.model()
        server.save(model, 1, "a")
        server.save(model, 2, "b")
        server.save(model, 3, "b", overwrite=True)
        assert server.http.delete(f"/training_runs/{model}/checkpoints/weights/a").status_code in (200, 204)
        server.publish(model, 4)
        server.written()
        server.sql("UPDATE sessions SET finished_at = ?", LONG_AGO)
        server.collect()
        assert folders(server, "ephemeral") == [] and folders(server, "weights") == ["b@3"]
        assert trash(tmp_path) == []


def test_without_a_retention_nothing_waits(tmp_path):
    put(tmp_path, "old", 1)
    with serving(tmp_path, trash_retention_sec=0) as server:
        model = server.model()
        server.save(model, 1, "a")
        expire(server, "a")
        folder_of(server, model, "weights", "nameless@9", 4000)
        server.collect()
        assert folders(server, "weights") == [] and trash(tmp_path) == []


# -- how long ---------------------------------------------------------------------------------------------------------


def test_trash_that_is_past_its_time_is_removed(tmp_path):
    put(tmp_path, "young", 6 * DAY_S)
    put(tmp_path, "old", 8 * DAY_S)
    with serving(tmp_path) as server:
        assert any("model/weights/old" in what for what in server.collect())
    assert trash(tmp_path) == ["weights/young"]


def test_folders_in_the_trash_that_are_not_ours_stay(tmp_path):
    (tmp_path / "checkpoints" / ".trash" / "somebody's own").mkdir(parents=True)
    with serving(tmp_path) as server:
        server.collect()
    assert (tmp_path / "checkpoints" / ".trash" / "somebody's own").is_dir()


@pytest.mark.full
def test_trash_goes_oldest_first_when_a_save_needs_its_room(tmp_path):
    with serving(tmp_path, max_disk_gib=1.5 * MIB / 2**30) as server:
        model = server.model()
        server.save(model, 1, "a")
        put(tmp_path, "newer", 100, MIB)
        put(tmp_path, "older", 200, MIB)
        server.save(model, 2, "b")
        assert trash(tmp_path) == ["weights/newer"]
        put(tmp_path, "newest", 50, MIB)
        server.save(model, 3, "c")
        assert trash(tmp_path) == ["weights/newest"]


# -- back from there --------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_checkpoint_is_loaded_again_after_it_was_moved_back_and_adopted(tmp_path):
    with serving(tmp_path) as server:
        model = server.model()
        path = server.save(model, server.train(model, 1), "a")
        weights = server.logprobs(model, 4)
        expire(server, "a")
        server.collect()
    [found] = (tmp_path / "checkpoints" / ".trash").glob("*/*/*/*")
    back = tmp_path / "checkpoints" / found.relative_to(found.parents[2])
    back.parent.mkdir(parents=True, exist_ok=True)
    found.rename(back)
    options = [f"--checkpoints-base={tmp_path / 'checkpoints'}", f"--database-url=sqlite:///{tmp_path / 'server.db'}"]
    assert cli.main(["adopt", *options]) == 0
    os.utime(back, (LONG_AGO, LONG_AGO))
    with serving(tmp_path) as server:
        server.collect()
        body = {"session_id": server.session(), "model_seq_id": 0, "path": path, "optimizer": True}
        assert server.logprobs(server.run("/load_weights", body)["model_id"], 1) == weights


# -- the guard --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nameless", "surplus", "total", "too_much"),
    [
        (10, 0, 10, False),
        (11, 0, 11, True),
        (6, 5, 11, True),
        (11, 0, 54, True),
        (11, 0, 55, False),
        (20, 0, 100, False),
        (21, 0, 100, True),
    ],
)
def test_more_than_ten_folders_and_more_than_a_fifth_are_too_much(nameless, surplus, total, too_much):
    assert RemovalPlan(nameless, surplus, total).too_much == too_much


def nameless(server: Server, count: int) -> None:
    model = server.model()
    for number in range(count):
        folder_of(server, model, "weights", f"n{number}@{number}", 4000)


@pytest.mark.full
def test_a_round_that_would_take_too_much_takes_none_and_says_so_once(tmp_path, caplog):
    with serving(tmp_path) as server:
        nameless(server, 11)
        expired = server.model()
        server.save(expired, 1, "a")
        expire(server, "a")
        for _ in range(3):
            server.everything_later()
            server.collect()
        assert len(folders(server, "weights")) == 11 and trash(tmp_path) == ["weights/a@1"]
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert len(told) == 1 and "11 of 12 folders" in told[0] and "skyrl gc --force" in told[0]
        folder_of(server, expired, "weights", "more@99", 4000)
        server.everything_later()
        server.collect()
        assert sum(record.levelno == logging.ERROR for record in caplog.records) == 2


@pytest.mark.full
def test_checkpoints_that_became_surplus_all_at_once_stay_and_later_ones_go(tmp_path, caplog):
    with serving(tmp_path) as server:
        model = server.model()
        for seq_id in range(1, 13):
            server.save(model, seq_id, f"c{seq_id}")
    with serving(tmp_path, keep_last_checkpoints=1) as server:
        server.collect()
        assert len(folders(server, "weights")) == 12
        assert "0 that the database does not name, 11 beyond keep_last_checkpoints" in caplog.text
        server.save(model, 13, "c13")
        server.save(model, 14, "c14")
        server.collect()
        assert len(folders(server, "weights")) == 13 and trash(tmp_path) == ["weights/c13@13"]


def gc(folder: Path, *arguments: str) -> int:
    base, database = folder / "checkpoints", folder / "server.db"
    return cli.main(["gc", f"--checkpoints-base={base}", f"--database-url=sqlite:///{database}", *arguments])


@pytest.mark.full
def test_gc_says_what_the_guard_says_and_goes_on_where_it_is_forced(tmp_path, capsys):
    with serving(tmp_path) as server:
        nameless(server, 11)
    assert gc(tmp_path, "--dry-run") == 0
    told = capsys.readouterr().out
    assert "11 of 12 folders" in told and "would remove 0 things" in told
    assert gc(tmp_path) == 1
    assert "11 of 12 folders" in capsys.readouterr().err
    assert gc(tmp_path, "--force", "--dry-run") == 0
    assert "would remove 11 things" in capsys.readouterr().out and trash(tmp_path) == []
    assert gc(tmp_path, "--force") == 0
    assert "removed 11 things" in (told := capsys.readouterr().out) and "11 of them to .trash" in told
    assert len(trash(tmp_path)) == 11


@pytest.mark.full
def test_what_was_saved_since_a_backup_of_the_database_does_not_disappear(tmp_path):
    with serving(tmp_path) as server:
        model = server.model()
        server.save(model, 1, "a")
    backup = (tmp_path / "server.db").read_bytes()
    with serving(tmp_path) as server:
        for seq_id in range(2, 5):
            server.save(model, seq_id, f"c{seq_id}")
    (tmp_path / "server.db").write_bytes(backup)
    for path in (tmp_path / "checkpoints").glob("*/weights/*"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    with serving(tmp_path) as server:
        server.collect()
        assert folders(server, "weights") == ["a@1"]
    assert trash(tmp_path) == ["weights/c2@2", "weights/c3@3", "weights/c4@4"]
