"""A backup of a server under load is a state of it: served elsewhere, it goes on from that moment."""

import errno
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from skyrl import cli
from skyrl.admin.backup import dump_command
from skyrl.tinker.database.database import Database
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.test_api_checkpoints import load_as_new, save

ROUNDS_BEFORE = 5


def options(server: LiveServer) -> list[str]:
    return [
        f"--checkpoints-base={server.config.checkpoints_base}",
        f"--database-url={server.config.database_url}",
    ]


class Load:
    """A client that trains, saves and asks, on and on; it knows what the weights gave after each step."""

    def __init__(self, server: LiveServer):
        self.server, self.model = server, server.model()
        self.place = 1
        self.logprobs: list[list[float]] = []
        self.ending = threading.Event()
        self.enough = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        while not self.ending.is_set():
            self.place = self.server.train(self.model, self.place)
            self.logprobs.append(self.server.logprobs(self.model, self.place))
            self.server.result(save(self.server, self.model, self.place + 1, f"step-{len(self.logprobs)}"))
            self.place += 2
            if len(self.logprobs) == ROUNDS_BEFORE:
                self.enough.set()


def requests(database: Path, model: str) -> tuple[int, int]:
    """(optimizer steps in the log, next place) of a model."""
    with closing(sqlite3.connect(database)) as opened:
        query = "SELECT SUM(kind = 'optim_step'), MAX(seq_id) + 1 FROM requests WHERE model_id = ?"
        return opened.execute(query, [model]).fetchone()


def another_disk(*_: object) -> None:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


@pytest.mark.parametrize("same_disk", [True, False])
def test_a_backup_under_load_goes_on_elsewhere_from_what_it_was(tmp_path, monkeypatch, same_disk):
    if not same_disk:
        monkeypatch.setattr("os.link", another_disk)
    with LiveServer(tmp_path / "server", snapshot_every_steps=1) as server:
        wait_until_ready(server)
        load = Load(server)
        load.thread.start()
        load.enough.wait()
        assert cli.main(["backup", *options(server), f"--to={tmp_path / 'backup'}"]) == 0
        behind = len(load.logprobs)
        while len(load.logprobs) <= behind:  # it goes on
            load.ending.wait(0.001)
        load.ending.set()
        load.thread.join()
    moved = (tmp_path / "backup").rename(tmp_path / "moved")
    (tmp_path / "server").rename(tmp_path / "gone")
    steps, place = requests(moved / "tinker.db", load.model)
    assert ROUNDS_BEFORE <= steps <= len(load.logprobs)
    state = {"checkpoints_base": moved / "checkpoints", "database_url": f"sqlite:///{moved / 'tinker.db'}"}
    with LiveServer(moved, **state) as server:
        wait_until_ready(server)
        assert server.logprobs(load.model, place) == load.logprobs[steps - 1]
        path = f"tinker://{load.model}/weights/step-{ROUNDS_BEFORE - 1}"
        loaded = server.result(load_as_new(server, path))["model_id"]
        assert server.logprobs(loaded, 1) == load.logprobs[ROUNDS_BEFORE - 2]
        server.train(load.model, place + 1)


def test_a_backup_has_no_lock_of_the_server_and_is_tied(tmp_path):
    with LiveServer(tmp_path / "server") as server:
        wait_until_ready(server)
        server.train(server.model(), 1)
        assert cli.main(["backup", *options(server), f"--to={tmp_path / 'copy'}"]) == 0
    names = {path.name for path in (tmp_path / "copy" / "checkpoints").glob(".*")}
    assert names == {".state-id"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"--to": "full"}, "it is not empty"),
        ({"--to": "server/checkpoints/x"}, "it is below checkpoints_base"),
        ({"--database-url": "sqlite:///none.db"}, "there is no such file"),
        ({"--checkpoints-base": "none"}, "there is no such folder"),
    ],
)
def test_what_cannot_be_backed_up_is_refused_by_name(tmp_path, monkeypatch, capsys, change, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "server" / "checkpoints").mkdir(parents=True)
    (tmp_path / "server" / "tinker.db").touch()
    given = {
        "--to": "new",
        "--checkpoints-base": "server/checkpoints",
        "--database-url": "sqlite:///server/tinker.db",
        **change,
    }
    with pytest.raises(SystemExit) as exit_:
        cli.main(["backup", *(f"{name}={value}" for name, value in given.items())])
    assert exit_.value.code == 2 and why in capsys.readouterr().err


# -- what a disk and other users do -----------------------------------------------------------------------------------

SAVED = ("m/weights/first", "m/weights/second")


@pytest.fixture
def state(tmp_path: Path) -> Iterator[list[str]]:
    """Options of a state at rest, private as a server makes it, below an umask that is not."""
    base, url = tmp_path / "checkpoints", f"sqlite:///{tmp_path / 'tinker.db'}"
    before = os.umask(0o077)
    for folder in SAVED:
        (base / folder).mkdir(parents=True)
        (base / folder / "weights").write_text(folder)
    Database(url).close()
    os.umask(0o022)
    yield [f"--checkpoints-base={base}", f"--database-url={url}", f"--to={tmp_path / 'backup'}"]
    os.umask(before)


@pytest.mark.parametrize("target", ["made", "there"])
@pytest.mark.parametrize("same_disk", [True, False])
def test_nobody_else_can_read_a_backup(state, tmp_path, monkeypatch, same_disk, target):
    if target == "there":
        (tmp_path / "backup").mkdir()
    if not same_disk:
        monkeypatch.setattr("os.link", another_disk)
    assert cli.main(["backup", *state]) == 0
    made = [tmp_path / "backup", *(tmp_path / "backup").rglob("*")]
    assert {path.name for path in made} >= {"backup", "tinker.db", "m", "weights", "first", "second"}
    assert [path for path in made if path.stat().st_mode & 0o077] == []
    assert os.umask(0o022) == 0o022


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_folder_that_cannot_be_copied_is_named_with_the_reason(state, tmp_path, monkeypatch, capsys, code):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.link", another_disk)
    monkeypatch.setattr("shutil.copy2", refuse)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["backup", *state])
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and SAVED[0] in said and os.strerror(code) in said


def test_a_folder_that_goes_while_it_is_copied_is_left_out(state, tmp_path, monkeypatch):
    link = os.link

    def gone_first(source: str, target: str) -> None:
        if SAVED[0] in str(source):
            shutil.rmtree(Path(source).parent)
        link(source, target)

    monkeypatch.setattr("os.link", gone_first)
    assert cli.main(["backup", *state]) == 0
    assert [path.name for path in (tmp_path / "backup" / "checkpoints" / "m" / "weights").iterdir()] == ["second"]


@pytest.mark.parametrize(
    ("given", "shown", "password"),
    [
        ("postgresql://u:p%40ss@h:5433/d", "postgresql://u@h:5433/d", "p@ss"),
        ("postgresql+psycopg://u:p@h/d?sslmode=require", "postgresql://u@h/d?sslmode=require", "p"),
        ("postgresql://u@h/d?password=p", "postgresql://u@h/d", "p"),
        ("postgresql://u@h/d", "postgresql://u@h/d", None),
    ],
)
def test_pg_dump_is_told_the_password_where_nobody_sees_it(given, shown, password):
    command, environment = dump_command(given, Path("f"), "1-1")
    assert command[-1] == f"--dbname={shown}" and "--snapshot=1-1" in command
    assert environment.get("PGPASSWORD") == password
