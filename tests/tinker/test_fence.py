"""Two servers that have come to one database: the later one writes, the earlier one ends."""

import asyncio
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlmodel import Session, select

from skyrl.tinker.database.database import Database
from skyrl.tinker.database.fence import EPOCH, Superseded
from skyrl.tinker.database.tables import SettingRow
from tests.waiting import BOUND_S, until


def start_another(path: Path) -> None:
    """Change a database as the start of a server does, whoever has its lock."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE settings SET value = value + 1 WHERE name = ?", [EPOCH])


def store(session: Session) -> None:
    session.add(SettingRow(name="a", value="b"))


def stored(database: Database) -> list[str]:
    return list(database.read_now(lambda session: session.exec(select(SettingRow.name)).all()))


def test_each_start_has_an_epoch_of_its_own_and_writes(tmp_path):
    for _ in range(3):
        database = Database(f"sqlite:///{tmp_path / 'a.db'}")
        asyncio.run(database.write(lambda session: session.merge(SettingRow(name="a", value="b"))))
        assert sorted(stored(database)) == ["a", EPOCH]
        database.close()


def test_a_server_that_another_has_followed_writes_nothing_and_says_so(tmp_path):
    database, told = Database(f"sqlite:///{tmp_path / 'a.db'}"), []
    database.fence.on_superseded = told.append
    start_another(tmp_path / "a.db")
    with pytest.raises(Superseded, match=r"database_url=.*a\.db: another server has been started"):
        asyncio.run(database.write(store))
    assert stored(database) == [EPOCH] and len(told) == 1
    database.close()


def test_a_server_that_another_has_followed_answers_nothing_and_ends(own_server):
    server = own_server.app.state.server
    model = own_server.model()
    own_server.engine.hold()
    request = own_server.submit_pass(model, 1)
    start_another(own_server.folder / "server.db")
    own_server.engine.let_go()
    until(server.failed.is_set, "the server says that it has failed")
    assert own_server.poll(request).status_code == 408 and "another server has been started" in server.failure
    with closing(sqlite3.connect(own_server.folder / "server.db")) as database:
        assert database.execute("SELECT status FROM requests WHERE seq_id = 1").fetchall() == [("pending",)]


@pytest.mark.full
def test_a_locked_database_fails_the_jobs_of_a_group_together(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'a.db'}")
    tries, begun, go_on = [], [], threading.Event()

    def begin(connection, cursor, statement: str, *_: object) -> None:
        if statement.startswith("BEGIN"):
            begun.append(statement)
            assert go_on.wait(BOUND_S)

    def job(number: int, session: Session) -> None:
        tries.append(number)
        session.execute(SettingRow.__table__.insert(), {"name": str(number), "value": ""})

    async def main() -> list[object]:
        await database.write(lambda session: session.connection().exec_driver_sql("PRAGMA busy_timeout = 300"))
        other.execute("BEGIN IMMEDIATE")
        event.listen(database._engine, "before_cursor_execute", begin)
        earlier = asyncio.create_task(database.write(lambda session: job(-1, session)))
        await asyncio.to_thread(until, lambda: begun, "the first job begins")
        jobs = [asyncio.create_task(database.write(lambda session, n=n: job(n, session))) for n in range(20)]
        await asyncio.to_thread(until, lambda: database._queue.qsize() == 20, "the others wait for it")
        go_on.set()
        return await asyncio.gather(earlier, *jobs, return_exceptions=True)

    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as other:
        results = asyncio.run(main())
        other.execute("ROLLBACK")
    assert [isinstance(result, OperationalError) for result in results] == [True] * 21
    assert tries == [] and begun == ["BEGIN IMMEDIATE"] * 2
    database.close()
