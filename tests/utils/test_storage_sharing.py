"""Folders that are copied, read piece by piece, and written piece by piece."""

import hashlib

import pytest

from skyrl.errors import StorageError
from skyrl.utils.files.atomic_folders import (
    MANIFEST,
    copy_folder,
    open_folder,
    read_folder,
    remove_folder,
    write_folder,
)

FILES = {"a": b"one" * 1000, "b": b""}


def test_copy_holds_the_same_files(tmp_path):
    write_folder(tmp_path / "source", FILES)
    copy_folder(tmp_path / "source", tmp_path / "deep" / "copy")
    assert read_folder(tmp_path / "deep" / "copy") == FILES


def test_copy_shares_its_bytes_with_the_source(tmp_path):
    write_folder(tmp_path / "source", FILES)
    copy_folder(tmp_path / "source", tmp_path / "copy")
    assert (tmp_path / "copy" / "a").samefile(tmp_path / "source" / "a")


def test_copy_outlives_its_source(tmp_path):
    write_folder(tmp_path / "source", FILES)
    copy_folder(tmp_path / "source", tmp_path / "copy")
    remove_folder(tmp_path / "source")
    assert read_folder(tmp_path / "copy") == FILES


def test_copy_of_an_incomplete_folder_is_refused(tmp_path):
    write_folder(tmp_path / "source", FILES)
    (tmp_path / "source" / "a").unlink()
    with pytest.raises(StorageError, match="a is missing"):
        copy_folder(tmp_path / "source", tmp_path / "copy")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_open_files_can_be_read_after_their_folder_is_gone(tmp_path):
    write_folder(tmp_path / "folder", FILES)
    with open_folder(tmp_path / "folder") as files:
        remove_folder(tmp_path / "folder")
        assert {file.name: file.reader.read() for file in files} == FILES


def test_open_file_knows_its_size_and_hash(tmp_path):
    write_folder(tmp_path / "folder", FILES)
    with open_folder(tmp_path / "folder") as (a, _):
        assert (a.size_bytes, a.sha256) == (3000, hashlib.sha256(FILES["a"]).hexdigest())


def test_folder_with_a_cut_off_file_is_not_opened(tmp_path):
    write_folder(tmp_path / "folder", FILES)
    (tmp_path / "folder" / "a").write_bytes(b"on")
    with pytest.raises(StorageError, match="another length"), open_folder(tmp_path / "folder"):
        pass


def test_file_that_is_written_piece_by_piece_is_in_the_manifest_as_a_whole(tmp_path):
    pieces = [b"12", b"345", b""]
    written = write_folder(tmp_path / "folder", {"a": lambda file: [file.write(piece) for piece in pieces]})
    assert written.size_bytes == 5
    assert written.digest == hashlib.sha256((tmp_path / "folder" / MANIFEST).read_bytes()).hexdigest()
    assert read_folder(tmp_path / "folder") == {"a": b"12345"}


def test_write_that_fails_halfway_leaves_nothing(tmp_path):
    def fail(file):
        file.write(b"12")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        write_folder(tmp_path / "folder", {"a": fail})
    assert list(tmp_path.iterdir()) == []
