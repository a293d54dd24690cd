"""Checkpoint folders: all or nothing, replaced as a whole, refused when damaged."""

import os

import pytest

from skyrl.errors import RequestError, StorageError
from skyrl.utils.storage import MANIFEST, read_folder, write_folder

OLD = {"a": b"old"}
NEW = {"a": b"new", "b": b"more"}


def test_what_was_written_is_read_back_and_its_size_told(tmp_path):
    assert write_folder(tmp_path / "x" / "y", NEW).size_bytes == 7
    assert read_folder(tmp_path / "x" / "y") == NEW


def test_a_folder_replaces_an_older_one_and_leaves_nothing_beside_it(tmp_path):
    write_folder(tmp_path / "x", NEW)
    write_folder(tmp_path / "x", OLD)
    assert read_folder(tmp_path / "x") == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


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
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("manifest", [b"", b"[]", b'{"a": 1}', b'{"a": {}}', b'{"gone": {"sha256": ""}}', b"\xff"])
def test_a_manifest_that_does_not_fit_is_refused(tmp_path, manifest):
    write_folder(tmp_path / "x", OLD)
    (tmp_path / "x" / MANIFEST).write_bytes(manifest)
    with pytest.raises(StorageError, match="missing or incomplete"):
        read_folder(tmp_path / "x")


def test_a_changed_file_is_refused_by_name(tmp_path):
    write_folder(tmp_path / "x", OLD)
    (tmp_path / "x" / "a").write_bytes(b"odd")
    with pytest.raises(StorageError, match="x/a is damaged"):
        read_folder(tmp_path / "x")


def test_urls_are_refused_by_their_scheme():
    with pytest.raises(RequestError, match="s3:// is not served yet"):
        write_folder("s3://bucket/x", OLD)
