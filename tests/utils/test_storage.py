"""Folders on disk: all or nothing whenever the process is killed, replaced as a whole, set aside when damaged."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from skyrl.errors import RequestError, StorageError
from skyrl.utils.failpoints import CRASH_POINTS
from skyrl.utils.files.atomic_folders import (
    MANIFEST,
    inspect_folder,
    read_folder,
    remove_folder,
    replace_file,
    tidy,
    write_folder,
)

OLD = {"a": b"old"}
NEW = {"a": b"new", "b": b"more"}
STORAGE_POINTS = sorted(name for name in CRASH_POINTS if name.startswith("storage: "))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def damaged(folder: Path) -> str:
    """The message of the error that reading raises."""
    with pytest.raises(StorageError) as error:
        read_folder(folder)
    return str(error.value)


def test_what_was_written_is_read_back_and_its_size_told(tmp_path):
    assert write_folder(tmp_path / "x" / "y", NEW).size_bytes == 7
    assert read_folder(tmp_path / "x" / "y") == NEW


def test_digest_is_the_hash_of_the_manifest(tmp_path):
    digest = write_folder(tmp_path / "x", NEW).digest
    assert digest == hashlib.sha256((tmp_path / "x" / MANIFEST).read_bytes()).hexdigest()


def test_a_folder_replaces_an_older_one_and_leaves_nothing_beside_it(tmp_path):
    write_folder(tmp_path / "x", NEW)
    write_folder(tmp_path / "x", OLD)
    assert read_folder(tmp_path / "x") == OLD
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("failing", [1, 2], ids=["moving the old one away", "moving the new one in"])
def test_a_replacement_that_fails_leaves_the_older_folder(tmp_path, monkeypatch, failing):
    write_folder(tmp_path / "x", OLD)
    rename, calls = os.rename, []

    def full_disk(source, target):
        calls.append(target)
        if len(calls) == failing:
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", full_disk)
    with pytest.raises(StorageError, match="No space left on device; free space"):
        write_folder(tmp_path / "x", NEW)
    assert read_folder(tmp_path / "x") == OLD
    assert names(tmp_path) == ["x"]


def test_the_longest_name_of_a_file_system_can_be_replaced(tmp_path):
    path = tmp_path / ("n" * 250)
    write_folder(path, OLD)
    write_folder(path, NEW)
    assert read_folder(path) == NEW


def test_files_are_on_disk_before_their_folder_is_in_place_and_its_name_after(tmp_path, monkeypatch):
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def watch_fsync(handle):
        calls.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def watch_rename(source, target):
        calls.append(f"rename to {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "rename", watch_rename)
    write_folder(tmp_path / "models" / "x", OLD)
    temporary = next(call for call in calls if call.endswith(".tmp"))
    assert calls == [tmp_path.name, "a", MANIFEST, temporary, "rename to x", "models"]


def test_a_file_that_cannot_be_replaced_stays_what_it_was(tmp_path, monkeypatch):
    path = tmp_path / "made" / "x"
    replace_file(path, b"old")

    def full_disk(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(StorageError, match="made/x: No space left on device; free space"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"


# -- killed -----------------------------------------------------------------------------------------------------------

WRITER = f"""
import sys
import threading
from contextlib import suppress
from skyrl.utils.files.atomic_folders import write_folder
write_folder(sys.argv[1], {NEW!r})
"""


def killed_writer(target: Path, point: str) -> None:
    """Write NEW in a process that is killed at a crash point."""
    points = target.parent.parent / "points"
    points.mkdir()
    (points / point).touch()
    environment = {**os.environ, "SKYRL_CRASH_POINTS": str(points)}
    writer = subprocess.run([sys.executable, "-c", WRITER, str(target)], env=environment, timeout=60)
    assert writer.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("point", "older"),
    [(point, OLD) for point in STORAGE_POINTS]
    + [(point, None) for point in STORAGE_POINTS if point != "storage: older folder moved aside"],
)
def test_killed_write_leaves_the_folder_wholly_old_or_wholly_new(tmp_path, point, older):
    """Before and after tidying, which leaves nothing else."""
    target = tmp_path / "base" / "x"
    target.parent.mkdir()
    if older is not None:
        write_folder(target, older)
    killed_writer(target, point)
    expected = NEW if point == "storage: folder in place" else older
    for _ in range(2):
        if expected is None:
            assert inspect_folder(target) is None
            assert "is missing" in damaged(target)
        else:
            written = inspect_folder(target)
            assert written is not None
            assert read_folder(target, written.digest) == expected
        tidy(target.parent)
        assert names(target.parent) == ([] if expected is None else ["x"])


@pytest.mark.parametrize("point", STORAGE_POINTS)
def test_write_after_a_killed_one_replaces_it(tmp_path, point):
    target = tmp_path / "base" / "x"
    target.parent.mkdir()
    write_folder(target, OLD)
    killed_writer(target, point)
    write_folder(target, {"c": b"third"})
    tidy(target.parent)
    assert read_folder(target) == {"c": b"third"} and names(target.parent) == ["x"]


# -- damaged ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b'{"a": 1}',
        b'{"a": {}}',
        b'{"a": {"sha256": ""}}',
        b"\xff",
        json.dumps({"../secret": {"sha256": hashlib.sha256(b"s").hexdigest(), "bytes": 1}}).encode(),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path, manifest):
    (tmp_path / "secret").write_bytes(b"s")
    write_folder(tmp_path / "x", OLD)
    (tmp_path / "x" / MANIFEST).write_bytes(manifest)
    assert inspect_folder(tmp_path / "x") is None
    assert "manifest is incomplete" in damaged(tmp_path / "x")


def test_a_changed_file_is_refused_by_name(tmp_path):
    write_folder(tmp_path / "x", OLD)
    (tmp_path / "x" / "a").write_bytes(b"odd")
    assert "the hash of a differs" in damaged(tmp_path / "x")


@pytest.mark.parametrize("gone", ["a", MANIFEST])
def test_a_missing_file_is_refused_by_name(tmp_path, gone):
    write_folder(tmp_path / "x", OLD)
    (tmp_path / "x" / gone).unlink()
    assert inspect_folder(tmp_path / "x") is None
    assert f"{gone} is missing" in damaged(tmp_path / "x")


def test_a_damaged_folder_is_moved_aside_as_the_error_says(tmp_path):
    write_folder(tmp_path / ("n" * 250), OLD)
    (tmp_path / ("n" * 250) / "a").write_bytes(b"odd")
    message = damaged(tmp_path / ("n" * 250))
    [name] = names(tmp_path)
    assert name.endswith(".quarantined") and f"quarantined at {tmp_path / name}" in message
    assert (tmp_path / name / "a").read_bytes() == b"odd"


def test_a_folder_of_another_digest_is_refused_and_stays(tmp_path):
    written = write_folder(tmp_path / "x", OLD)
    write_folder(tmp_path / "x", NEW)
    with pytest.raises(StorageError, match="not what was saved there"):
        read_folder(tmp_path / "x", written.digest)
    assert read_folder(tmp_path / "x") == NEW


def test_a_folder_that_is_replaced_while_it_is_read_is_read_whole(tmp_path, monkeypatch):
    write_folder(tmp_path / "x", OLD)
    opened = os.open

    def replace_after_the_manifest(path, flags, *args, **options):
        handle = opened(path, flags, *args, **options)
        if path == MANIFEST:
            monkeypatch.undo()
            write_folder(tmp_path / "x", NEW)
        return handle

    monkeypatch.setattr(os, "open", replace_after_the_manifest)
    assert read_folder(tmp_path / "x") == NEW
    assert names(tmp_path) == ["x"]


def test_inspection_tells_what_the_write_told(tmp_path):
    assert write_folder(tmp_path / "x", NEW) == inspect_folder(tmp_path / "x")


def test_a_file_of_another_length_is_no_complete_folder(tmp_path):
    write_folder(tmp_path / "x", OLD)
    (tmp_path / "x" / "a").write_bytes(b"longer than it was")
    assert inspect_folder(tmp_path / "x") is None


def test_removal_tells_how_many_bytes_it_freed(tmp_path):
    write_folder(tmp_path / "x", NEW)
    size = 7 + (tmp_path / "x" / MANIFEST).stat().st_size
    assert remove_folder(tmp_path / "x") == size
    assert names(tmp_path) == [] and remove_folder(tmp_path / "x") == 0


def test_urls_are_refused_by_their_scheme():
    with pytest.raises(RequestError, match="s3:// is no local path; use a path on a local"):
        write_folder("s3://bucket/x", OLD)


@pytest.mark.full
def test_folder_is_written_though_those_above_it_are_removed_while_they_are_empty(tmp_path):
    """As a collector does beside a save."""
    stop = threading.Event()

    def remove() -> None:
        while not stop.wait(0.005):
            for path in (tmp_path / "model/kind", tmp_path / "model"):
                with suppress(OSError):
                    path.rmdir()

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for number in range(50):
            write_folder(tmp_path / "model/kind" / str(number), {"a": b"1"})
            remove_folder(tmp_path / "model/kind" / str(number))
    finally:
        stop.set()
        remover.join()
