"""The same server on PostgreSQL: a cluster of its own, on loopback, where PostgreSQL is installed."""

import asyncio
import os
import random
import shutil
import string
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlmodel import Session, SQLModel, select, text

from skyrl import cli
from skyrl.errors import RequestError
from skyrl.tinker.checkpoints.disk_budget import saved_folders
from skyrl.tinker.database import database as db
from skyrl.tinker.database import fence
from skyrl.tinker.database.database import Database, migration_config
from skyrl.tinker.database.fence import SERVER_LOCK, Superseded
from skyrl.tinker.database.tables import SessionRow
from skyrl.tinker.local_server import reserve_port
from skyrl.utils.locks.lease import InUse
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.processes import running
from tests.tinker.test_db import written_together
from tests.tinker.test_durability import Script
from tests.tinker.test_failing_database import patient, run_script, undisturbed  # noqa: F401 (a fixture)
from tests.tinker.test_ledger import TOKENS, tokens, usage
from tests.waiting import BOUND_S, until

pytest.importorskip("psycopg", reason="needs the postgres extra")
USER = "postgres"


def run(*command: object, folder: Path) -> None:
    """Run a program of PostgreSQL's, which refuse to be run by root."""
    user = USER if os.geteuid() == 0 else None
    environment = {**os.environ, "PGCTLTIMEOUT": f"{BOUND_S:.0f}"}
    result = subprocess.run(
        [str(part) for part in command], user=user, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


@dataclass
class Cluster:
    """A PostgreSQL server with its data in `folder`."""

    folder: Path
    port: int

    def stop(self) -> None:
        run("pg_ctl", "stop", "--wait", "-D", self.folder / "data", "-m", "immediate", folder=self.folder)

    def start(self) -> None:
        run("pg_ctl", "start", "--wait", "-D", self.folder / "data", "-l", self.folder / "log", folder=self.folder)

    def restart(self) -> None:
        """As after a crash: connections end, and what was not committed is gone."""
        self.stop()
        self.start()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of the test's own."""
    if shutil.which("initdb") is None or shutil.which("pg_ctl") is None:
        pytest.skip("PostgreSQL (initdb, pg_ctl) is not installed")
    folder = Path(tempfile.mkdtemp(prefix="skyrl-postgres-"))  # pytest's own are closed to other users
    if os.geteuid() == 0:
        shutil.chown(folder, USER)
    data, reserved = folder / "data", reserve_port()
    port = reserved.getsockname()[1]
    try:
        run("initdb", "--pgdata", data, "--username", USER, "--auth", "trust", "--no-sync", folder=folder)
        (data / "postgresql.auto.conf").write_text(
            f"listen_addresses = '127.0.0.1'\nport = {port}\nunix_socket_directories = '{folder}'\nfsync = off\n"
        )
        cluster = Cluster(folder, port)
        cluster.start()
        yield cluster
        cluster.stop()
    finally:
        reserved.close()
        shutil.rmtree(folder)


@pytest.fixture
def url(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    """A database of its own for each test."""
    name = f"t{abs(hash(request.node.name))}"
    server = f"postgresql+psycopg://{USER}@127.0.0.1:{cluster.port}"
    admin = sqlalchemy.create_engine(f"{server}/postgres", isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    admin.dispose()
    return f"postgresql://{USER}@127.0.0.1:{cluster.port}/{name}"


def add_session(session_id: str, session: Session) -> None:
    session.add(SessionRow(session_id=session_id, tenant="t"))


@pytest.mark.parametrize("by", ["the server", "alembic"])
def test_tables_equal_the_newest_revision(url, by):
    if by == "the server":
        Database(url).close()
    engine = sqlalchemy.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        if by == "alembic":
            command.upgrade(migration_config(connection), "head")
        context = MigrationContext.configure(connection, opts={"compare_type": True})  # it cannot compare JSON defaults
        assert compare_metadata(context, SQLModel.metadata) == []
    engine.dispose()


def test_revisions_lead_up_and_down_again(url):
    engine = sqlalchemy.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        command.upgrade(migration_config(connection), "head")
        command.downgrade(migration_config(connection), "base")
    assert sqlalchemy.inspect(engine).get_table_names() == ["alembic_version"]
    engine.dispose()


def too_large(session: Session) -> None:
    add_session("lost", session)
    session.exec(text("SELECT repeat('x', 2000000000)"))


def test_a_statement_past_the_limits_of_the_database_fails_alone(url):
    database = Database(url)
    commits: list[object] = []
    sqlalchemy.event.listen(database._engine, "commit", commits.append)
    jobs = [partial(add_session, "a"), too_large, partial(add_session, "b")]
    outcomes = asyncio.run(written_together(database, jobs))
    assert [type(outcome).__name__ for outcome in outcomes] == ["NoneType", "OperationalError", "NoneType"]
    assert len(commits) == 2
    stored = database.read_now(lambda session: session.exec(select(SessionRow.session_id)).all())
    assert sorted(stored) == ["a", "b"]
    database.close()


def test_a_project_may_have_a_name_of_any_length(url):
    database = Database(url)
    name = "".join(random.Random(0).choices(string.printable, k=18_000))
    row = SessionRow(session_id="a", tenant="t", project_id=name)
    asyncio.run(database.write(lambda session: session.add(row)))
    of_project = select(SessionRow.session_id).where(SessionRow.project_id == name)
    assert database.read_now(lambda session: session.exec(of_project).all()) == ["a"]
    database.close()


def test_second_server_on_the_same_database_is_refused(url, monkeypatch):
    monkeypatch.setattr(db, "CLAIM_S", 0.1)
    database = Database(url)
    with pytest.raises(RequestError, match=r"in use by another server.*--database-url"):
        Database(url)
    database.close()
    Database(url).close()


def test_dry_run_leaves_the_database_as_it_was(url):
    database = Database(url)
    database.dry_run(partial(add_session, "a"))
    assert database.read_now(lambda session: session.exec(select(SessionRow)).all()) == []
    database.close()


def test_what_was_used_and_done_is_told_after_a_restart(url, tmp_path):
    with LiveServer(tmp_path, database_url=url) as server:
        wait_until_ready(server)
        model = server.model()
        server.train(server.model(), 1, TOKENS)
        after = server.train(model, 1, TOKENS)
        sampled = server.sample(server.sampler(server.session(), 0, base_model="fake/model"), 0, num_samples=2)
        path = server.run("/save_weights", {"model_id": model, "seq_id": after, "path": "a"})["path"]
    with LiveServer(tmp_path, database_url=url) as server:
        wait_until_ready(server)
        assert tokens(server, "training", forward_only=False) == 2 * len(TOKENS)
        assert tokens(server, "sampling_sample") == sum(map(len, sampled))
        assert (
            len({event.get("session_id") for event in usage(server)} - {None}) == 3
        )  # two that train, one that samples
        entries = server.http.get("/audit", params={"event_type": "checkpoints"}).json()["entries"]
        assert [(entry["event"], entry["tinker_path"]) for entry in entries] == [("checkpoint_create", path)]
        (stored,) = server.http.get("/billing/usage/checkpoints/current").json()["data"]
        assert stored["checkpoint_count"] == 1 and stored["size_bytes"] > 0
        for per in ("total", "day"):
            rows = server.http.get(f"{server.url}/operator/usage", params={"per": per}).json()["data"]
            assert sum(row["trained_tokens"] for row in rows) == 2 * len(TOKENS)
            assert sum(row["checkpoints_created"] for row in rows) == 1


@pytest.mark.full
def test_a_backup_is_restored_into_another_database_beside_a_moved_folder(url, cluster, tmp_path):
    with LiveServer(tmp_path / "server", database_url=url) as server:
        wait_until_ready(server)
        model = server.model()
        after = server.train(model, 1)
        server.run("/save_weights", {"model_id": model, "seq_id": after, "path": "kept"})
        expected = server.logprobs(model, after + 1)
        options = [f"--checkpoints-base={tmp_path / 'server' / 'checkpoints'}", f"--to={tmp_path / 'backup'}"]
        assert cli.main(["backup", f"--database-url={url}", *options]) == 0
    dump, restored = cluster.folder / "tinker.dump", f"{url}_restored"
    shutil.copy(tmp_path / "backup" / "tinker.dump", dump)
    dump.chmod(0o644)
    run("createdb", f"--maintenance-db={url}", Path(restored).name, folder=cluster.folder)
    run("pg_restore", "--no-owner", f"--dbname={restored}", dump, folder=cluster.folder)
    base = (tmp_path / "backup" / "checkpoints").rename(tmp_path / "moved")
    with LiveServer(tmp_path / "other", database_url=restored, checkpoints_base=base) as server:
        wait_until_ready(server)
        assert server.logprobs(model, after + 2) == expected


DUMP_AFTER_A_SAVE = """#!/bin/bash
psql --quiet --dbname={url} --command="{insert}"
mkdir -p {saved}
{pg_dump} "$@"
status=$?
psql --quiet --dbname={url} --command="DELETE FROM versions"
rm -r {saved}
exit $status
"""


def test_a_backup_holds_all_that_its_dump_names(url, tmp_path, monkeypatch):
    """Also of what is there for no longer than pg_dump runs."""
    Database(url).close()
    base, folder, real = tmp_path / "checkpoints", "m/snapshots/1", shutil.which("pg_dump")
    base.mkdir()
    insert = "INSERT INTO versions (version, model_id, session_id, tenant, folder, digest, created_at) VALUES "
    insert += f"('v', 'm', 's', 't', '{folder}', 'digest', 0)"
    script = DUMP_AFTER_A_SAVE.format(url=url, insert=insert, saved=base / folder, pg_dump=real)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pg_dump").write_text(script)
    (tmp_path / "bin" / "pg_dump").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    options = [f"--database-url={url}", f"--checkpoints-base={base}", f"--to={tmp_path / 'backup'}"]
    assert cli.main(["backup", *options]) == 0
    listed = subprocess.run(
        ["pg_restore", "--data-only", "--table=versions", "--file=-", tmp_path / "backup" / "tinker.dump"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "COPY" in listed and folder not in listed
    assert saved_folders(tmp_path / "backup" / "checkpoints") == set()


@pytest.mark.full
def test_everything_that_can_be_collected_is(url, tmp_path):
    with LiveServer(tmp_path, database_url=url, session_cleanup_interval_sec=-1, keep_last_checkpoints=1) as server:
        wait_until_ready(server)
        model = server.model()
        for seq_id, name in enumerate("abc", 1):
            server.run("/save_weights", {"model_id": model, "seq_id": seq_id, "path": name})
        server.run("/save_weights_for_sampler", {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 1})
        gone = server.model()
        old = time.time() - 40 * 24 * 3600

        def make_older(session: Session) -> None:
            for statement in (
                "UPDATE results SET finished_at = :old",
                "UPDATE sessions SET finished_at = :old",
                "UPDATE versions SET created_at = :old",
                "UPDATE requests SET body = 'x'",
                "UPDATE models SET snapshot_seq_id = 4",
            ):
                session.connection().execute(text(statement), {"old": old} if ":old" in statement else {})

        service = server.app.state.server.service
        server.on_loop(service.database.write(make_older))
        removed = [removal.what for removal in server.on_loop(service.disk.collect())]
        assert sum(what.startswith("checkpoint beyond the newest 1") for what in removed) == 2
        assert f"session {gone.partition(':')[0]} with 1 models" in removed
        assert any("results" in what for what in removed) and any("bodies" in what for what in removed)


@pytest.mark.full
def test_results_and_versions_past_their_limits_go(url, tmp_path):
    limits = {"keep_last_ephemeral": 2, "max_ephemeral_gib": 1e-9, "ephemeral_idle_sec": 0, "max_results_gib": 1e-9}
    with LiveServer(tmp_path, database_url=url, session_cleanup_interval_sec=-1, **limits) as server:
        wait_until_ready(server)
        model = server.model()
        for number in (1, 2, 3):
            server.run(
                "/save_weights_for_sampler", {"model_id": model, "seq_id": number, "sampling_session_seq_id": number}
            )
        service = server.app.state.server.service
        unwritten = text("SELECT count(*) FROM versions WHERE digest IS NULL")
        until(
            lambda: not service.database.read_now(lambda session: session.connection().execute(unwritten).scalar()),
            "all versions are written",
        )
        older = text("UPDATE results SET finished_at = finished_at - 700")
        server.on_loop(service.database.write(lambda session: session.connection().execute(older).rowcount))
        removed = [removal.what for removal in server.on_loop(service.disk.collect())]
        assert f"version {model}@1 beyond keep_last_ephemeral=2" in removed
        assert f"version {model}@2 beyond max_ephemeral_gib=1e-09" in removed
        assert any("results" in what for what in removed)


# -- connections that end ---------------------------------------------------------------------------------------------


def end_the_locks_connection(url: str) -> None:
    """As a firewall does that has not seen anything of it for a while."""
    admin = sqlalchemy.create_engine(url.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        holder = f"SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = {SERVER_LOCK}"
        until(lambda: not connection.exec_driver_sql(holder).all(), "nobody holds the lock of the server")
    admin.dispose()


def wait_for(url: str, query: str, what: str) -> None:
    """Return once a query has a row."""
    admin = sqlalchemy.create_engine(url.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        until(lambda: connection.exec_driver_sql(query).all(), what)
    admin.dispose()


def test_a_lock_that_was_lost_is_taken_again(url, monkeypatch):
    monkeypatch.setattr(fence, "WATCH_S", 0.02)
    database = Database(url)
    end_the_locks_connection(url)
    taken = f"SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND objid = {SERVER_LOCK}"
    wait_for(url, taken, "the lock is taken again")
    monkeypatch.setattr(db, "CLAIM_S", 0.1)
    with pytest.raises(RequestError, match="in use by another server"):
        Database(url)
    asyncio.run(database.write(partial(add_session, "a")))
    database.close()


def test_a_server_whose_lock_another_has_taken_writes_nothing_and_ends(url):
    first, told = Database(url), []
    first.fence.on_superseded = told.append
    end_the_locks_connection(url)
    second = Database(url)
    with pytest.raises(Superseded, match="another server has been started on this database"):
        asyncio.run(first.write(partial(add_session, "a")))
    asyncio.run(second.write(partial(add_session, "b")))
    assert second.read_now(lambda session: session.exec(select(SessionRow.session_id)).all()) == ["b"]
    assert len(told) == 1
    first.close()
    second.close()


@pytest.mark.full
def test_a_server_that_does_nothing_finds_out_that_another_has_its_database(url, monkeypatch):
    monkeypatch.setattr(fence, "WATCH_S", 0.2)
    first, told = Database(url), threading.Event()
    first.fence.on_superseded = lambda _: told.set()

    def opened() -> Database | None:
        end_the_locks_connection(url)
        try:
            return Database(url)
        except InUse:  # the first one has taken the lock again
            return None

    second = until(opened, "the second server has the lock")
    until(told.is_set, "the first server has found out")
    first.close()
    second.close()


def test_a_transaction_that_has_begun_ends_before_another_server_starts(url):
    """So none of an earlier server's is stored after the start of a later one."""
    first = Database(url)
    begun, may_end, order = threading.Event(), threading.Event(), []

    def slow(session: Session) -> None:
        begun.set()
        may_end.wait()
        add_session("a", session)
        order.append("written")

    writer = threading.Thread(target=lambda: asyncio.run(first.write(slow)))
    writer.start()
    until(begun.is_set, "the transaction has begun")
    end_the_locks_connection(url)
    second: list[Database] = []
    starter = threading.Thread(target=lambda: (second.append(Database(url)), order.append("started")))
    starter.start()
    wait_for(url, "SELECT 1 FROM pg_locks WHERE NOT granted", "the second server waits for the transaction")
    assert order == []
    may_end.set()
    writer.join()
    starter.join()
    assert order == ["written", "started"]
    first.close()
    second[0].close()


@pytest.mark.full("reads", "writes")
@pytest.mark.parametrize("kind", ["reads", "writes", "answers"])
def test_a_database_that_fails_every_so_often_changes_no_outcome(url, tmp_path, undisturbed, kind):  # noqa: F811
    assert run_script(tmp_path, database_url=url, faults={kind: 7}) == undisturbed


@pytest.mark.full
def test_restarts_of_the_database_change_no_outcome(cluster, url, tmp_path, undisturbed):  # noqa: F811
    """Three times, while requests are under way and an engine comes back."""
    with LiveServer(tmp_path, database_url=url, snapshot_every_steps=2) as server:
        wait_until_ready(patient(server))
        script, sent, restarts = Script(server), 0, []
        with ThreadPoolExecutor(1) as own:  # one restart after another
            while script.submit():
                sent += 1
                if sent in (3, 9, 15):
                    restarts.append(own.submit(cluster.restart))
                    server.crash()
                    server.recover()
                    if sent == 9:
                        restarts[-1].result()
            outcomes = script.finish()
        assert [restart.result() for restart in restarts] == [None] * 3
        assert outcomes == undisturbed


@pytest.mark.full
def test_a_server_that_is_started_again_while_its_database_is_away_waits_for_it(cluster, url, tmp_path):
    with running(tmp_path, database_url=url) as server:
        model = server.model()
        cluster.stop()
        server.kill("api")
        server.wait_for("it cannot be opened")
        cluster.start()
        server.wait_for("serving again at")
        server.train(model, 1)
