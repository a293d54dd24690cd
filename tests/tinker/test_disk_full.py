"""Full disks: what does not fit is refused by name, the rest goes on, and nothing that was acknowledged is lost."""

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import event, text
from sqlmodel import Session, select

from skyrl.tinker.database.database import Database
from skyrl.tinker.database.fence import EPOCH
from skyrl.tinker.database.tables import SettingRow
from skyrl.tinker.errors import DatabaseFull
from tests.tinker.harness import PROTOBUF, LiveServer, pass_request, wait_until_ready

LARGE = "x" * 1_000_000
PROTOBUF_BODY = {"Content-Type": PROTOBUF}


# -- the database's writer --------------------------------------------------------------------------------------------


class SmallDisk:
    """A database whose file cannot grow beyond so many pages: SQLite reports that as it does a full disk."""

    def __init__(self, path: Path):
        self.database = Database(f"sqlite:///{path}")
        self.pages = 100
        event.listen(self.database._engine, "checkout", self._limit)

    def _limit(self, connection, record, proxy) -> None:
        connection.execute(f"PRAGMA max_page_count = {self.pages}")

    def write(self, *values: str) -> list[object]:
        """Results of jobs that arrive together, one for each value that is to be stored."""

        async def main() -> list[object]:
            jobs = [self.database.write(lambda session, value=value: store(session, value)) for value in values]
            return await asyncio.gather(*jobs, return_exceptions=True)

        return asyncio.run(main())

    def stored(self) -> list[str]:
        return self.database.read_now(
            lambda session: sorted(session.exec(select(SettingRow.value).where(SettingRow.name != EPOCH)).all())
        )


def store(session: Session, value: str) -> None:
    session.add(SettingRow(name=value[:20], value=value))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallDisk]:
    small = SmallDisk(tmp_path / "a.db")
    yield small
    small.database.close()


def test_write_that_does_not_fit_fails_by_name_and_leaves_nothing(small):
    [error] = small.write(LARGE)
    assert isinstance(error, DatabaseFull) and "a.db: database or disk is full; free space" in str(error)
    assert small.stored() == []


def test_writer_goes_on_after_a_full_disk(small):
    for _ in range(20):
        assert isinstance(small.write(LARGE)[0], DatabaseFull)
    assert small.write("small") == [None]
    small.pages = 10_000
    assert small.write(LARGE) == [None]
    assert small.stored() == ["small", LARGE]


def test_jobs_that_fit_are_stored_when_one_beside_them_does_not(small):
    results = small.write("a", LARGE, "b")
    assert [isinstance(result, DatabaseFull) for result in results] == [False, True, False]
    assert small.stored() == ["a", "b"]


def test_jobs_beyond_the_writers_bound_wait_and_are_done(tmp_path, monkeypatch):
    monkeypatch.setattr("skyrl.tinker.database.database.MAX_QUEUED", 3)
    database = Database(f"sqlite:///{tmp_path / 'a.db'}")
    longest = []

    async def main() -> None:
        def job(number: int, session: Session) -> None:
            longest.append(database._queue.qsize())
            store(session, str(number))

        await asyncio.gather(*[database.write(lambda session, n=n: job(n, session)) for n in range(50)])

    asyncio.run(main())
    assert (
        database.read_now(lambda session: session.exec(text("SELECT count(*) FROM settings")).scalar()) == 51
    )  # and the epoch
    assert max(longest) <= 3
    database.close()


# -- a server on a small disk -----------------------------------------------------------------------------------------


class Disk:
    """A file system of its own, and a file that fills it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.filler = folder / "filler"

    def fill(self) -> None:
        with self.filler.open("wb", buffering=0) as file:
            for size in (65536, 4096, 1):
                while True:
                    try:
                        file.write(b"\1" * size)
                    except OSError:
                        break

    def free(self) -> None:
        self.filler.unlink()


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[[int], Disk]]:
    """Makes small disks, where this user may mount them."""
    mounted: list[Path] = []

    def make(mib: int) -> Disk:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", folder], capture_output=True)
        if mount.returncode != 0:
            pytest.skip(f"tmpfs cannot be mounted here: {mount.stderr.decode()}")
        mounted.append(folder)
        return Disk(folder)

    yield make
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


def save(server: LiveServer, model: str, seq_id: int, name: str) -> str:
    body = {"model_id": model, "seq_id": seq_id, "path": name}
    return server.ok("/save_weights", body)["request_id"]


@pytest.mark.parametrize("path", ["/save_weights", "/save_weights_for_sampler"])
def test_save_on_a_full_disk_fails_by_name_and_training_goes_on(tmp_path, make_disk, path):
    disk = make_disk(4)
    with LiveServer(tmp_path, checkpoints_base=disk.folder / "checkpoints", min_free_disk_mib=0) as server:
        wait_until_ready(server)
        model = server.model()
        kept = server.result(save(server, server.model(), 1, "kept"))["path"]
        disk.fill()
        failure = server.failure(server.ok(path, {"model_id": model, "seq_id": 1, "path": "a"})["request_id"])
        assert failure["category"] == "server" and "No space left on device" in failure["error"]
        body = {"session_id": server.session(), "model_seq_id": 0, "path": kept}
        assert server.run("/load_weights", body)["model_id"]
        after = server.train(model, 2)
        disk.free()
        assert server.run(path, {"model_id": model, "seq_id": after, "path": "a"})["path"].endswith("/a")


@pytest.mark.full
def test_save_that_would_take_what_is_to_stay_free_is_refused_with_the_numbers(tmp_path, make_disk):
    disk = make_disk(8)
    with LiveServer(tmp_path, checkpoints_base=disk.folder / "checkpoints", min_free_disk_mib=16) as server:
        wait_until_ready(server)
        failure = server.failure(save(server, server.model(), 1, "a"))
    assert failure["category"] == "user"
    assert "min_free_disk_mib=16" in failure["error"] and "--min-free-disk-mib" in failure["error"]


def test_requests_that_cannot_be_logged_are_turned_away_and_acknowledged_ones_are_answered(tmp_path, make_disk):
    disk = make_disk(8)
    database_url = f"sqlite:///{disk.folder / 'server.db'}"
    with LiveServer(tmp_path, database_url=database_url, min_free_disk_mib=0) as server:
        wait_until_ready(server)
        model, acknowledged = server.model(), []
        disk.fill()
        body = pass_request(model, 1, [list(range(1, 500))] * 3)
        while True:  # what the database's files have room for is taken
            body.seq_id = len(acknowledged) + 1
            response = server.http.post("/forward_backward", content=body.SerializeToString(), headers=PROTOBUF_BODY)
            if response.status_code != 200:
                break
            acknowledged.append(response.json()["request_id"])
        assert response.status_code == 503 and "disk" in response.json()["detail"]
        disk.free()
        for request_id in acknowledged:
            assert server.pass_result(request_id).loss_fn_outputs
        server.train(model, body.seq_id)


# -- the budget -------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_save_past_the_budget_is_refused_with_the_numbers_until_something_is_deleted(tmp_path):
    with LiveServer(tmp_path, max_disk_gib=1e-6) as server:  # 1,074 bytes, and a checkpoint of this model takes 300
        wait_until_ready(server)
        model, seq_id = server.model(), 1
        while "error" not in (answer := server.outcome(save(server, model, seq_id, f"s{seq_id}")).json()):
            seq_id += 1
        assert seq_id > 1 and answer["category"] == "user"
        assert "max_disk_gib=1e-06" in answer["error"] and "--max-disk-gib" in answer["error"]
        assert server.http.delete(f"/training_runs/{model}/checkpoints/weights/s1").status_code == 204
        assert server.result(save(server, model, seq_id + 1, "again"))


@pytest.mark.full
def test_expired_checkpoints_make_room_before_a_save_is_refused(tmp_path):
    with LiveServer(tmp_path, max_disk_gib=1e-6, session_cleanup_interval_sec=-1) as server:
        wait_until_ready(server)
        model = server.model()

        def expire(session: Session) -> None:
            session.exec(text("UPDATE checkpoints SET expires_at = 1"))

        for seq_id in range(1, 12):
            assert "path" in server.result(save(server, model, seq_id, f"s{seq_id}"))
            server.on_loop(server.app.state.server.service.database.write(expire))
