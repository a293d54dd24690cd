"""Background writes and reads: the order of each model's, and that nobody waits for another's."""

import threading
from collections.abc import Iterator

import pytest

from skyrl.backends.common.background_writer import THREADS, Writer
from skyrl.errors import StorageError
from skyrl.types import SaveOutput


class Disk:
    """Folders by path, and one that does not answer before `answer` is set."""

    def __init__(self):
        self.folders: list[str] = []
        self.answer = threading.Event()

    def write(self, path: str) -> SaveOutput:
        self.folders.append(path)
        return SaveOutput(path)

    def slow_write(self, path: str) -> SaveOutput:
        assert self.answer.wait(60)
        return self.write(path)

    def read(self, path: str) -> str:
        if path not in self.folders:
            raise StorageError(f"{path} is missing")
        return path


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.answer.set()


@pytest.fixture
def writer(disk: Disk) -> Iterator[Writer]:
    writer = Writer(lambda version, saved: disk.folders.append(f"{version} is stored"))
    yield writer
    disk.answer.set()
    writer.close()


def test_a_save_that_takes_long_holds_up_no_other_models_save_or_load(writer, disk):
    slow = writer.submit("huge", "/huge", lambda: disk.slow_write("/huge"))
    assert writer.submit("small", "/small", lambda: disk.write("/small")).result(30) == SaveOutput("/small")
    assert writer.read("/small", lambda: disk.read("/small")).result(30) == "/small"
    assert writer.snapshot("small", "/snapshot", lambda: disk.write("/snapshot")).result(30)
    assert not slow.done()


def test_large_writes_of_any_number_of_models_hold_up_no_small_one(writer, disk):
    for number in range(2 * THREADS):
        writer.submit(f"huge{number}", f"/{number}", lambda number=number: disk.slow_write(f"/{number}"), large=True)
    assert writer.submit("small", "/small", lambda: disk.write("/small")).result(30) == SaveOutput("/small")


def test_loads_go_on_while_as_many_models_are_written_as_can_be(writer, disk):
    for number in range(THREADS + 1):
        writer.submit(f"huge{number}", f"/huge{number}", lambda number=number: disk.slow_write(f"/huge{number}"))
    disk.write("/small")
    assert writer.read("/small", lambda: disk.read("/small")).result(30) == "/small"


def test_a_models_writes_are_in_the_order_in_which_they_were_handed_over(writer, disk):
    first = writer.submit("model", "/first", lambda: disk.slow_write("/first"))
    version = writer.keep_version("v", "model", "/version", lambda: disk.write("/version"))
    last = writer.snapshot("model", "/last", lambda: disk.write("/last"))
    assert not version.done() and not last.done()
    disk.answer.set()
    last.result(30)
    assert first.done() and version.result() is None
    assert disk.folders == ["/first", "/version", "v is stored", "/last"]


@pytest.mark.parametrize("path", ["/models/a/save", "/models/b/../a/save"])
def test_a_folder_is_read_after_what_any_model_is_writing_there(writer, disk, path):
    writer.submit("a", "/models/a/save", lambda: disk.slow_write("/models/a/save"))
    reading = writer.read(path, lambda: disk.read("/models/a/save"))
    assert not reading.done()
    disk.answer.set()
    assert reading.result(30) == "/models/a/save"


def test_a_folder_is_written_by_one_model_at_a_time(writer, disk):
    writer.submit("a", "/same", lambda: disk.slow_write("by a"))
    writer.submit("b", "/same", lambda: disk.write("by b"))
    disk.answer.set()
    writer.wait()
    assert disk.folders == ["by a", "by b"]


def test_a_write_that_fails_lets_the_next_go_on(writer, disk):
    failed = writer.submit("model", "/a", lambda: disk.read("/a"))
    assert writer.submit("model", "/b", lambda: disk.write("/b")).result(30) == SaveOutput("/b")
    with pytest.raises(StorageError, match="/a is missing"):
        failed.result()


def test_the_end_waits_for_all_that_was_handed_over(writer, disk):
    for model in "ab":
        for number in range(3):
            path = f"/{model}{number}"
            writer.submit(model, path, lambda path=path: disk.write(path))
    writer.close()
    assert sorted(disk.folders) == [f"/{model}{number}" for model in "ab" for number in range(3)]
