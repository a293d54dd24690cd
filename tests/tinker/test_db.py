"""The database: revisions, group commit, refusals, concurrent use."""

import asyncio
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlmodel import Session, SQLModel, select

from skyrl.errors import RequestError, UnknownName
from skyrl.tinker.database.database import Database, Job, migration_config
from skyrl.tinker.database.log import request_log
from skyrl.tinker.database.tables import ModelRow, RequestRow, SessionRow, SettingRow
from skyrl.tinker.results import Answer, Failure


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'state' / 'server.db'}")
    yield database
    database.close()


def add_session(session_id: str, session: Session) -> None:
    session.add(SessionRow(session_id=session_id, tenant="t"))


def session_ids(session: Session) -> list[str]:
    return sorted(session.exec(select(SessionRow.session_id)).all())


def entry(request_id: str, model_id: str = "m", seq_id: int | None = 1, needs_model: bool = False) -> request_log.Entry:
    return request_log.Entry(request_id, "optim_step", "t", model_id, seq_id, b"body", "text/x", "", needs_model)


def append(entry: request_log.Entry, refusal: Failure | None = None):
    return partial(request_log.append, entry=entry, refusal=refusal, on_log=lambda session: None)


async def written_together(database: Database, jobs: Sequence[Job]) -> list[object]:
    """Return the results of jobs that share a transaction: they queue up while the writer is busy."""
    busy, go_on = threading.Event(), threading.Event()

    def hold(session: Session) -> None:
        busy.set()
        go_on.wait()

    first = asyncio.create_task(database.write(hold))
    await asyncio.to_thread(busy.wait)
    tasks = [asyncio.create_task(database.write(job)) for job in jobs]
    await asyncio.sleep(0)
    go_on.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("by", ["the server", "alembic"])
def test_tables_equal_the_newest_revision(tmp_path, by):
    if by == "the server":
        Database(f"sqlite:///{tmp_path / 'a.db'}").close()
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'a.db'}")
    with engine.begin() as connection:
        if by == "alembic":
            command.upgrade(migration_config(connection), "head")
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, SQLModel.metadata) == []
        assert context.get_current_heads() == tuple(
            ScriptDirectory.from_config(migration_config(connection)).get_heads()
        )
    engine.dispose()


@pytest.mark.full
def test_a_new_database_and_one_of_the_newest_revision_are_opened_without_alembic(tmp_path):
    code = f"""
import sys
from skyrl.tinker.database.database import Database
for _ in range(2):
    Database("sqlite:///{tmp_path / "a.db"}").close()
print([name for name in sys.modules if name.startswith(("alembic", "mako"))])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_write_ahead_logging_is_on(database):
    assert database.read_now(lambda session: session.connection().exec_driver_sql("PRAGMA journal_mode").scalar()) == (
        "wal"
    )


def test_committed_write_is_seen_by_another_process_at_once(database, tmp_path):
    asyncio.run(database.write(partial(add_session, "a")))
    with sqlite3.connect(tmp_path / "state" / "server.db") as other:
        assert other.execute("SELECT session_id FROM sessions").fetchall() == [("a",)]
    other.close()


def test_new_connections_do_not_disturb_a_write_that_is_under_way(database):
    def read_then_write(session: Session) -> None:
        session_ids(session)
        database.read_now(session_ids)
        add_session("a", session)
        session.flush()

    asyncio.run(database.write(read_then_write))
    assert database.read_now(session_ids) == ["a"]


def test_jobs_that_fail_leave_the_one_commit_of_their_group_whole(database):
    commits = []
    event.listen(database._engine, "commit", lambda connection: commits.append(1))

    def refused(name: str, session: Session) -> None:
        add_session(name, session)
        session.flush()
        raise UnknownName(name)

    jobs = [partial(add_session if number % 2 else refused, str(number)) for number in range(100)]
    results = asyncio.run(written_together(database, jobs))
    assert [isinstance(result, UnknownName) for result in results] == [True, False] * 50
    assert database.read_now(session_ids) == sorted(str(number) for number in range(1, 100, 2))
    assert len(commits) == 2


STEPS = st.tuples(st.sampled_from(["add", "add and raise", "raise", "read"]), st.sampled_from("abcde"))


@pytest.mark.full
@given(jobs=st.lists(STEPS, min_size=1, max_size=12))
@settings(max_examples=20, deadline=None)
def test_a_group_stores_what_its_jobs_would_store_one_after_the_other(tmp_path_factory, jobs):
    def run(kind: str, name: str, session: Session) -> list[str] | SessionRow | None:
        if kind.startswith("add"):
            row = SessionRow(session_id=name, tenant="t")
            session.add(row)
        if kind.endswith("raise"):
            session.flush()
            raise KeyError(name)
        return session_ids(session) if kind == "read" else row

    expected: list[object] = []
    there: set[str] = set()
    for kind, name in jobs:
        if kind == "read":
            expected.append(sorted(there))
        elif kind.startswith("add") and name in there:
            expected.append(IntegrityError)
        elif kind.endswith("raise"):
            expected.append(KeyError)
        else:
            there.add(name)
            expected.append(name)

    database = Database(f"sqlite:///{tmp_path_factory.mktemp('group') / 'a.db'}")
    results = asyncio.run(written_together(database, [partial(run, *job) for job in jobs]))
    found = [
        type(result) if isinstance(result, Exception) else getattr(result, "session_id", result) for result in results
    ]
    assert found == expected and set(database.read_now(session_ids)) == there
    database.close()


def test_a_group_whose_commit_is_not_confirmed_is_not_done_again(database, monkeypatch):
    commit, ran = Session.commit, []

    def committing(session: Session) -> None:
        commit(session)
        if ran:
            raise OperationalError("COMMIT", {}, Exception("the connection was closed"))

    monkeypatch.setattr(Session, "commit", committing)
    errors = asyncio.run(written_together(database, [lambda session: ran.append(1)] * 2))
    assert [type(error) for error in errors] == [OperationalError] * 2
    assert ran == [1, 1]


@pytest.mark.full
def test_second_server_is_refused_also_where_it_names_its_driver(database, tmp_path):
    with pytest.raises(RequestError, match=r"in use by another server.*--database-url"):
        Database(f"sqlite+pysqlite:///{tmp_path / 'state' / 'server.db'}")


def test_a_write_that_nobody_waits_for_any_more_does_not_stop_the_next(database):
    blocked = threading.Event()

    async def main() -> list[str]:
        running = asyncio.create_task(database.write(lambda session: blocked.wait()))
        waiting = asyncio.create_task(database.write(partial(add_session, "given up")))
        await asyncio.sleep(0.05)
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        blocked.set()
        await asyncio.wait_for(database.write(partial(add_session, "next")), 10)
        return await database.read(session_ids)

    assert "next" in asyncio.run(main())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://host/name", "sqlite:///FILE or postgresql"),
        ("nonsense", "sqlite:///FILE or postgresql"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:////proc/none/server.db", "can be written"),
    ],
)
def test_url_that_cannot_be_served_says_what_to_use(url, message):
    with pytest.raises(RequestError, match=message):
        Database(url)


def test_postgresql_without_its_driver_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
    with pytest.raises(RequestError, match=r"skyrl\[postgres\]"):
        Database("postgresql://localhost/skyrl")


def test_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "a.db").write_bytes(b"not a database" * 100)
    with pytest.raises(RequestError, match="cannot be opened"):
        Database(f"sqlite:///{tmp_path / 'a.db'}")


def test_database_of_a_newer_version_is_refused(tmp_path):
    Database(f"sqlite:///{tmp_path / 'a.db'}").close()
    with sqlite3.connect(tmp_path / "a.db") as other:
        other.execute("UPDATE alembic_version SET version_num = 'future'")
    other.close()
    with pytest.raises(RequestError, match="another version of this server"):
        Database(f"sqlite:///{tmp_path / 'a.db'}")


# -- the log of requests ----------------------------------------------------------------------------------------------


def test_log_keeps_the_body_as_it_was_sent(database):
    asyncio.run(database.write(append(entry("r"))))
    row = database.read_now(lambda session: session.get(RequestRow, "r"))
    assert (row.body, row.content_type, row.status) == (b"body", "text/x", "pending")


def test_second_request_of_a_seq_id_is_the_first(database):
    async def main() -> list[str]:
        logged = await asyncio.gather(*[database.write(append(entry(name))) for name in ("r", "s", "t")])
        return [item.request_id for item in logged]

    assert asyncio.run(main()) == ["r", "r", "r"]


def test_requests_without_a_seq_id_are_all_new(database):
    async def main() -> list[str]:
        logged = await asyncio.gather(*[database.write(append(entry(name, seq_id=None))) for name in ("r", "s")])
        return [item.request_id for item in logged]

    assert asyncio.run(main()) == ["r", "s"]


def test_answer_replaces_the_body(database):
    asyncio.run(database.write(append(entry("r"))))
    asyncio.run(database.write(partial(request_log.finish, request_id="r", outcome=Answer(b"{}"))))
    assert database.read_now(lambda session: request_log.outcome_of(session, "r")) == ("t", Answer(b"{}"))
    assert database.read_now(lambda session: session.exec(text("SELECT body FROM requests")).scalar()) == b""


def test_a_request_sees_what_an_earlier_job_of_its_transaction_has_made_of_its_model(database):
    def make(session: Session) -> None:
        row = ModelRow(
            model_id="m", session_id="s", tenant="t", base_model="b", lora_config={}, user_metadata={}, status="live"
        )
        session.add(row)

    def unload(session: Session) -> None:
        row = session.get(ModelRow, "m")
        assert row is not None
        row.status = "unloaded"

    def job(session: Session) -> list[bool]:
        refused = []
        for seq_id, change in enumerate([make, unload], 1):
            change(session)
            logged = append(entry(str(seq_id), seq_id=seq_id, needs_model=True))(session)
            refused.append(logged.refusal is not None)
        return refused

    assert asyncio.run(database.write(job)) == [False, True]


@pytest.mark.parametrize(("status", "category"), [("lost", "server"), ("unloaded", "user"), ("failed", "user")])
def test_request_to_a_model_that_is_gone_is_logged_as_failed(database, status, category):
    def add(session: Session) -> None:
        row = ModelRow(
            model_id="m", session_id="s", tenant="t", base_model="b", lora_config={}, user_metadata={}, status=status
        )
        session.add(row)

    asyncio.run(database.write(add))
    logged = asyncio.run(database.write(append(entry("r", needs_model=True))))
    assert logged.refusal is not None and logged.refusal.category == category
    assert database.read_now(lambda session: request_log.outcome_of(session, "r"))[1] == logged.refusal


@pytest.mark.full
def test_a_write_waits_for_another_programs_write_to_end(tmp_path):
    """SQLite waits for no lock in a transaction that has read something, so ours takes it first."""
    url = f"sqlite:///{tmp_path / 'server.db'}"
    with (
        closing(Database(url)) as database,
        closing(sqlite3.connect(tmp_path / "server.db", isolation_level=None)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")

        async def scenario():
            writing = asyncio.create_task(database.write(lambda session: session.add(SettingRow(name="a", value="1"))))
            await asyncio.sleep(0.5)
            assert not writing.done()
            other.execute("ROLLBACK")
            await writing

        asyncio.run(scenario())
        assert database.read_now(lambda session: session.get_one(SettingRow, "a")).value == "1"
