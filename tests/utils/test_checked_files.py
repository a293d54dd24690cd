"""Files of a folder that are read in parts after their hashes were compared."""

import hashlib
from pathlib import Path

import pytest

from skyrl.errors import DamagedFiles, StorageError
from skyrl.utils.files.atomic_folders import hash_of, open_checked, remove_folder, write_folder

FILES = {"a": b"one" * 1000, "b": b"two"}


@pytest.fixture
def folder(tmp_path) -> Path:
    write_folder(tmp_path / "folder", FILES)
    return tmp_path / "folder"


def in_other_process(sizes):
    return {path: hash_of(path) for path in sizes}


@pytest.mark.parametrize("hashes", [None, in_other_process])
def test_all_contents_are_read(folder, hashes):
    with open_checked(folder, hashes=hashes) as files:
        assert dict(files) == FILES and files.same_elsewhere == (hashes is not None)
        assert files.open("a").seek(2998) == 2998 and files.open("a").read() == b"ne"


def test_files_stay_readable_when_their_folder_is_removed(folder):
    with open_checked(folder) as files:
        remove_folder(folder)
        assert dict(files) == FILES


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_a_folder_that_changes_while_others_read_it_is_noticed(folder, change):
    with open_checked(folder) as files:
        files.check_unmoved()
        if change == "replaced":
            write_folder(folder, FILES)
        else:
            remove_folder(folder)
        with pytest.raises(StorageError, match="replaced or removed while it was read; try again"):
            files.check_unmoved()


@pytest.mark.parametrize("hashes", [None, in_other_process])
def test_a_file_with_another_hash_sets_the_folder_aside(folder, hashes):
    (folder / "b").write_bytes(b"TWO")
    with pytest.raises(DamagedFiles, match="the hash of b differs"), open_checked(folder, hashes=hashes):
        pass
    assert not folder.exists()


def test_other_processes_that_read_something_else_damage_nothing(folder):
    wrong = hashlib.sha256(b"an older folder").hexdigest()
    with open_checked(folder, hashes=lambda sizes: dict.fromkeys(sizes, wrong)) as files:
        assert dict(files) == FILES and not files.same_elsewhere


def test_other_processes_get_paths_and_sizes(folder):
    asked = []

    def hashes(sizes):
        asked.append(sizes)
        return in_other_process(sizes)

    with open_checked(folder, hashes=hashes):
        assert asked == [{folder / "a": 3000, folder / "b": 3}]


def test_another_manifest_than_the_expected_one_is_refused(folder):
    with pytest.raises(DamagedFiles, match="its manifest differs"), open_checked(folder, "0" * 64):
        pass
    assert folder.exists()


def test_a_missing_folder_is_said_to_be_missing(tmp_path):
    with pytest.raises(DamagedFiles, match="is missing"), open_checked(tmp_path / "none"):
        pass
