"""A folder of checkpoints that moved, or that does not belong to the database: nothing in it is lost by that."""

import asyncio
import json
import os
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from skyrl import cli
from skyrl.errors import RequestError
from skyrl.tinker.checkpoints.disk_budget import hold_folder
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.database.database import Database
from skyrl.tinker.server import TinkerServer
from tests.tinker.harness import BASE_MODEL, LiveServer, ThreadEngine, wait_until_ready
from tests.tinker.processes import running
from tests.tinker.test_retention import LONG_AGO, Server, session_of
from tests.waiting import until


@dataclass
class Left:
    """State that a server has left in `folder`, and the log-probabilities that its weights give."""

    folder: Path
    live: str
    """A trained model with a snapshot."""
    seq_id: int
    """Its next one."""
    loaded: str
    """A model made of a checkpoint, of which there is no snapshot: the log says how to make it."""
    path: str
    """A checkpoint, of the same weights as all of these."""
    sampler: str
    """Of a version without a name."""
    logprobs: list[float]
    tokens: list[list[int]]

    @property
    def base(self) -> Path:
        return self.folder / "checkpoints"

    def saved(self) -> list[str]:
        """MODEL/KIND/NAME of everything."""
        return sorted(str(path.relative_to(self.base)) for path in self.base.glob("*/*/*"))

    def grow_old(self) -> None:
        """Nothing is too young to be collected."""
        for path in self.base.glob("*/*/*"):
            os.utime(path, (LONG_AGO, LONG_AGO))

    def sql(self, statement: str) -> list[tuple]:
        with closing(sqlite3.connect(self.folder / "server.db")) as database, database:
            return database.execute(statement).fetchall()

    def untie(self) -> None:
        """As servers left it that knew no ids."""
        (self.base / ".state-id").unlink()
        self.sql("DELETE FROM settings WHERE name LIKE 'state_id%'")

    def options(self, base: Path | None = None, database: Path | None = None) -> list[str]:
        """Of the command line."""
        base, database = base or self.base, database or self.folder / "server.db"
        return [f"--checkpoints-base={base}", f"--database-url=sqlite:///{database}"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Left:
    return leave(tmp_path_factory.mktemp("original") / "state")


@pytest.fixture
def left(original: Left, tmp_path: Path) -> Left:
    """A copy, for one test."""
    shutil.copytree(original.folder, tmp_path / "state")
    return replace(original, folder=tmp_path / "state")


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """State of another server."""
    return leave(tmp_path_factory.mktemp("another") / "state")


def leave(folder: Path) -> Left:
    """Run a server and kill it, so that what it would write when it is stopped is not there."""
    at_its_end = folder.with_name(f"{folder.name}-at-its-end")
    with Server(folder, snapshot_every_steps=1, session_cleanup_interval_sec=-1) as server:
        wait_until_ready(server)
        live = server.model()
        path = server.save(live, server.train(live, 1), "w")
        sampler = server.publish(live, 4)
        body = {"session_id": session_of(live), "model_seq_id": 1, "path": path, "optimizer": True}
        loaded = server.run("/load_weights", body)["model_id"]
        server.written()
        until(lambda: not server.sql("SELECT * FROM models WHERE snapshot_folder IS NULL"), "all models have snapshots")
        found = Left(folder, live, 6, loaded, path, sampler, server.logprobs(live, 5), server.sample(sampler, 1))
        shutil.copytree(folder / "checkpoints", at_its_end / "checkpoints")
        with (
            closing(sqlite3.connect(folder / "server.db")) as now,
            closing(sqlite3.connect(at_its_end / "server.db")) as copy,
        ):
            now.backup(copy)
    shutil.rmtree(folder)
    at_its_end.rename(folder)
    # As before the snapshot that follows a load.
    [(snapshot,)] = found.sql(f"SELECT snapshot_folder FROM models WHERE model_id = '{loaded}'")
    shutil.rmtree(found.base / snapshot)
    found.sql(f"UPDATE models SET snapshot_folder = NULL, snapshot_seq_id = NULL WHERE model_id = '{loaded}'")
    found.sql(
        f"UPDATE requests SET body = CAST('{json.dumps(body)}' AS BLOB) WHERE model_id = '{loaded}' AND seq_id = 0"
    )
    found.grow_old()
    return found


def check_all_is_there(left: Left, base: Path | None = None) -> None:
    """Collect, start a server, let it collect, and use everything."""
    before = left.saved()
    assert cli.main(["gc", *left.options(base)]) == 0
    with Server(left.folder, checkpoints_base=base or left.base) as server:
        wait_until_ready(server)
        server.on_loop(server.app.state.server.service.disk.collect())
        assert set(before) <= set(left.saved())
        assert server.logprobs(left.live, left.seq_id) == left.logprobs
        assert server.logprobs(left.loaded, 1) == left.logprobs
        assert server.sample(left.sampler, 2) == left.tokens
        session = server.session()
        body = {"session_id": session, "model_seq_id": 0, "path": left.path, "optimizer": True}
        assert server.logprobs(server.run("/load_weights", body)["model_id"], 1) == left.logprobs


# -- moved ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_folder_that_is_reached_through_a_link_is_the_same_folder(left, tmp_path):
    (tmp_path / "link").symlink_to(left.base)
    check_all_is_there(left, base=tmp_path / "link")


@pytest.mark.full
def test_a_folder_and_its_database_move_together(left, tmp_path):
    left.folder = left.folder.rename(tmp_path / "elsewhere")
    check_all_is_there(left)


# -- not its own ------------------------------------------------------------------------------------------------------


def refusal(base: Path, database: Path) -> str:
    """Reason why a server does not start."""
    config = EngineConfig(base_model=BASE_MODEL, checkpoints_base=base, database_url=f"sqlite:///{database}")
    with pytest.raises(RequestError) as refused:
        asyncio.run(TinkerServer(config, ThreadEngine).start())
    return str(refused.value)


@pytest.mark.parametrize("other", ["fresh database", "empty folder", "database of another folder"])
def test_a_server_refuses_two_that_do_not_belong_together_and_leaves_both(left, another, tmp_path, other):
    before = left.saved()
    base, database = left.base, left.folder / "server.db"
    if other == "fresh database":
        database = tmp_path / "default.db"
    elif other == "empty folder":
        base = tmp_path / "not mounted"
    else:
        database = another.folder / "server.db"
    for _ in range(2):
        told = refusal(base, database)
        assert f"checkpoints_base={base}" in told and f"database_url=sqlite:///{database}" in told
        assert "--checkpoints-base" in told and "--database-url" in told and "skyrl adopt" in told
    assert left.saved() == before
    check_all_is_there(left)


def test_state_from_before_there_were_ids_is_refused_as_well_where_nothing_fits(left, another, tmp_path):
    left.untie()
    test_a_server_refuses_two_that_do_not_belong_together_and_leaves_both(left, another, tmp_path, "fresh database")


@pytest.mark.full
def test_state_from_before_there_were_ids_is_tied_where_something_fits(left):
    left.untie()
    check_all_is_there(left)
    [(state_id,)] = left.sql("SELECT value FROM settings WHERE name = 'state_id'")
    assert (left.base / ".state-id").read_text() == state_id


@pytest.mark.full
def test_a_fresh_database_and_a_folder_without_models_are_tied_whatever_was_there_before(tmp_path):
    for name in ("a", "b"):
        with LiveServer(tmp_path, database_url=f"sqlite:///{tmp_path / name}.db") as server:
            wait_until_ready(server)


@pytest.mark.full
@pytest.mark.parametrize("point", ["in the database, not in the folder", "in the folder, not confirmed"])
@pytest.mark.parametrize("before", [pytest.param("nothing", marks=pytest.mark.slow), "state without ids"])
def test_a_kill_between_the_two_ids_does_not_make_the_next_start_refuse(original, tmp_path, point, before):
    folder, points = tmp_path / "state", tmp_path / "points"
    if before != "nothing":
        shutil.copytree(original.folder, folder)
        replace(original, folder=folder).untie()
    points.mkdir()
    (points / f"start: state id {point}").touch()
    with running(folder, env={"SKYRL_CRASH_POINTS": str(points)}):  # the launcher starts it again
        assert not list(points.iterdir())
    with closing(sqlite3.connect(folder / "server.db")) as database:
        [(name, state_id)] = database.execute("SELECT * FROM settings WHERE name LIKE 'state_id%'").fetchall()
    assert (name, state_id) == ("state_id", (folder / "checkpoints" / ".state-id").read_text())


# -- skyrl adopt ------------------------------------------------------------------------------------------------------


def test_adopt_says_what_it_finds_and_ties_the_two(left, capsys):
    (left.base / ".state-id").unlink()
    shutil.rmtree(left.base / left.sql("SELECT folder FROM versions")[0][0])
    assert cli.main(["adopt", *left.options(), "--dry-run"]) == 0
    told = capsys.readouterr().out
    there = len(left.saved())
    assert f"holds {there} saved folders, {there} of them of models that the database knows" in told
    assert "of 3 folders that the database names, 1 are missing" in told and "missing: " in told
    assert "skyrl adopt" in refusal(left.base, left.folder / "server.db")
    assert cli.main(["adopt", *left.options()]) == 0
    assert told.splitlines()[0] == capsys.readouterr().out.splitlines()[0]
    with LiveServer(left.folder) as server:
        wait_until_ready(server)


@pytest.mark.full
def test_adopt_names_checkpoints_again_that_a_restored_database_lacks(left, tmp_path):
    shutil.copy(left.folder / "server.db", tmp_path / "backup.db")
    with Server(left.folder) as server:
        wait_until_ready(server)
        paths = [server.save(left.live, left.seq_id + n, f"later-{n}", ttl_seconds=3600) for n in range(2)]
        sampler_path = server.run(
            "/save_weights_for_sampler", {"model_id": left.live, "seq_id": left.seq_id + 2, "path": "s"}
        )["path"]
    (tmp_path / "backup.db").rename(left.folder / "server.db")
    assert cli.main(["adopt", *left.options()]) == 0
    left.grow_old()
    check_all_is_there(left)
    with Server(left.folder) as server:
        wait_until_ready(server)
        listed = server.http.get(f"/training_runs/{left.live}/checkpoints").json()["checkpoints"]
        assert {each["tinker_path"] for each in listed} == {left.path, sampler_path, *paths}
        session = server.session()
        body = {"session_id": session, "model_seq_id": 0, "path": paths[0], "optimizer": True}
        assert server.logprobs(server.run("/load_weights", body)["model_id"], 1) == left.logprobs
        assert server.sample(server.sampler(session, 1, model_path=sampler_path), 1) == left.tokens


def test_adopt_gives_no_name_to_what_is_incomplete_or_of_a_model_that_nobody_knows(left, capsys):
    weights = left.base / left.sql("SELECT folder FROM checkpoints")[0][0]
    shutil.copytree(weights, weights.with_name("half@7"))
    next(path for path in weights.with_name("half@7").iterdir() if path.name != "manifest.json").unlink()
    shutil.copytree(weights, weights.with_name("w@9"))  # its name is in use
    shutil.copytree(weights, left.base / "unknown" / "weights" / "a@1")
    assert cli.main(["adopt", *left.options()]) == 0
    assert "3 folders have no name and get none" in capsys.readouterr().out
    assert left.sql("SELECT name FROM checkpoints") == [("w",)]


@pytest.mark.full
@pytest.mark.parametrize("verb", ["gc", "adopt"])
def test_a_command_refuses_beside_a_running_server(tmp_path, capsys, verb):
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        options = ["--checkpoints-base", str(tmp_path / "checkpoints"), "--database-url", server.config.database_url]
        assert cli.main([verb, *options]) == 1
    told = capsys.readouterr().err
    assert "in use by another server" in told and (verb != "gc" or "collects by itself" in told)


# -- skyrl gc with a wrong database -----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["gc", "adopt"])
@pytest.mark.parametrize("there", ["nothing", "an empty file", "another program's"])
def test_a_command_makes_no_database_and_removes_nothing(left, tmp_path, capsys, verb, there):
    before, database = left.saved(), tmp_path / "default" / "tinker.db"
    if there != "nothing":
        database.parent.mkdir()
        database.touch()
    if there == "another program's":
        with closing(sqlite3.connect(database)) as other, other:
            other.execute("CREATE TABLE theirs (a)")
    assert cli.main([verb, *left.options(database=database)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"database_url=sqlite:///{database}: " in line and "--database-url" in line
    if there == "nothing":
        assert not database.parent.exists()
    elif there == "an empty file":
        assert database.stat().st_size == 0
    else:
        with closing(sqlite3.connect(database)) as other:
            assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    assert left.saved() == before


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_gc_refuses_the_database_of_another_folder(left, another, capsys, dry_run):
    before = left.saved()
    assert cli.main(["gc", *left.options(database=another.folder / "server.db"), *dry_run]) == 1
    assert "do not belong together" in capsys.readouterr().err
    assert left.saved() == before


# -- locks ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_database_that_is_reached_through_a_link_is_locked_like_the_file(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "state" / "server.db")
    (tmp_path / "folder").symlink_to(tmp_path / "state")
    with closing(Database(f"sqlite:///{tmp_path / 'state' / 'server.db'}")):
        for other in (tmp_path / "link.db", tmp_path / "folder" / "server.db"):
            with pytest.raises(RequestError, match="in use by another server"):
                Database(f"sqlite:///{other}")


@pytest.mark.full
def test_a_folder_that_is_reached_through_a_link_is_locked_like_the_folder(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "state")
    with hold_folder(tmp_path / "state"), pytest.raises(RequestError, match="in use by another server"):
        hold_folder(tmp_path / "link")
