"""A folder as one tar: the same files again, wholly or not at all; and archives that are not what they should be."""

import io
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from skyrl.errors import RequestError, StorageError
from skyrl.utils.files.tar_folder import pack_folder, unpack_folder

FILES = {"a.json": b"{}", "b.safetensors": bytes(range(256)) * 40}
MOST = sum(map(len, FILES.values()))


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "given").mkdir()
    for name, content in FILES.items():
        (tmp_path / "given" / name).write_bytes(content)
    return tmp_path / "given"


def archive_of(path: Path, *members: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for info, content in members:
            info.size = len(content) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(content))
    return path


def member(name: str, **fields) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def test_a_folder_is_the_same_again(folder, tmp_path):
    pack_folder(folder, tmp_path / "packed.tar")
    unpack_folder(tmp_path / "packed.tar", tmp_path / "again", FILES, MOST)
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == FILES


def test_any_program_reads_it_as_an_uncompressed_tar(folder, tmp_path):
    pack_folder(folder, tmp_path / "packed.tar")
    listed = subprocess.run(["tar", "-tf", tmp_path / "packed.tar"], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == sorted(FILES)
    assert FILES["b.safetensors"] in (tmp_path / "packed.tar").read_bytes()


HOSTILE = {
    "a path above": (member("../a.json"), "holds '../a.json'"),
    "an absolute path": (member("/tmp/a.json"), "holds '/tmp/a.json'"),
    "another name": (member("c.json"), "holds 'c.json'"),
    "a link": (member("a.json", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "a.json in it is no plain file"),
    "a hard link": (member("a.json", type=tarfile.LNKTYPE, linkname="/etc/passwd"), "a.json in it is no plain file"),
    "a device": (member("a.json", type=tarfile.CHRTYPE, devmajor=1, devminor=5), "a.json in it is no plain file"),
    "a pipe": (member("a.json", type=tarfile.FIFOTYPE), "a.json in it is no plain file"),
    "a folder": (member("a.json", type=tarfile.DIRTYPE), "a.json in it is no plain file"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_does_not_belong_there_is_refused_and_not_written(tmp_path, kind):
    info, message = HOSTILE[kind]
    archive_of(tmp_path / "hostile.tar", (info, b"{}"))
    with pytest.raises(RequestError, match=message):
        unpack_folder(tmp_path / "hostile.tar", tmp_path / "in" / "here", FILES, MOST)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["here", "hostile.tar", "in"]


def test_more_bytes_than_are_expected_are_refused(folder, tmp_path):
    pack_folder(folder, tmp_path / "packed.tar")
    with pytest.raises(RequestError, match=rf"more than the {MOST - 1} bytes"):
        unpack_folder(tmp_path / "packed.tar", tmp_path / "again", FILES, MOST - 1)


def test_a_file_that_is_far_too_large_is_not_opened(tmp_path):
    with (tmp_path / "large.tar").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(RequestError, match=rf"it has {2**30} bytes, and {MOST} are the most"):
        unpack_folder(tmp_path / "large.tar", tmp_path / "again", FILES, MOST)


def test_the_same_name_twice_is_refused(tmp_path):
    twice = (member("a.json"), b"{}"), (member("a.json"), b"[]")
    with pytest.raises(RequestError, match=r"holds 'a.json', where \['b.safetensors'\] are left"):
        unpack_folder(archive_of(tmp_path / "twice.tar", *twice), tmp_path / "again", FILES, MOST)


def test_a_sparse_file_which_is_larger_than_its_archive_is_refused(tmp_path):
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(2**24)
        file.write(b"x")
    subprocess.run(["tar", "--sparse", "-cf", "sparse.tar", "a.json"], cwd=tmp_path, check=True)
    with pytest.raises(RequestError, match=r"a.json in it is no plain file"):
        unpack_folder(tmp_path / "sparse.tar", tmp_path / "again", FILES, 2**30)


def test_a_file_that_is_missing_is_named(tmp_path):
    archive_of(tmp_path / "short.tar", (member("a.json"), b"{}"))
    with pytest.raises(RequestError, match=r"it lacks \['b.safetensors'\]"):
        unpack_folder(tmp_path / "short.tar", tmp_path / "again", FILES, MOST)


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
def test_a_compressed_archive_is_refused(tmp_path, mode):
    archive_of(tmp_path / "packed.tar", (member("a.json"), b"{}"), mode=mode)
    with pytest.raises(RequestError, match="no whole uncompressed tar"):
        unpack_folder(tmp_path / "packed.tar", tmp_path / "again", FILES, MOST)


def test_an_archive_that_ends_early_is_refused(folder, tmp_path):
    pack_folder(folder, tmp_path / "packed.tar")
    whole = (tmp_path / "packed.tar").read_bytes()
    (tmp_path / "packed.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RequestError, match="no whole uncompressed tar"):
        unpack_folder(tmp_path / "packed.tar", tmp_path / "again", FILES, MOST)


def test_an_archive_that_is_not_there_is_a_matter_of_storage(tmp_path):
    with pytest.raises(StorageError, match=r"nowhere\.tar cannot be read"):
        unpack_folder(tmp_path / "nowhere.tar", tmp_path / "again", FILES, MOST)


def test_who_is_killed_in_the_middle_leaves_the_archive_that_was_there(folder, tmp_path):
    pack_folder(folder, tmp_path / "packed.tar")
    before = (tmp_path / "packed.tar").read_bytes()
    (folder / "a.json").write_bytes(b"[1, 2, 3]")
    (tmp_path / "points").mkdir()
    (tmp_path / "points" / "archive: half written").touch()
    program = (
        "import sys, pathlib; from skyrl.utils.files.tar_folder import pack_folder; "
        "pack_folder(*map(pathlib.Path, sys.argv[1:]))"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program, str(folder), str(tmp_path / "packed.tar")],
        env={**os.environ, "SKYRL_CRASH_POINTS": str(tmp_path / "points")},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "packed.tar").read_bytes() == before
