"""A folder as one tar: the same files again, wholly or not at all; and archives that are not what they should be."""

import gzip
import io
import os
import signal
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from skyrl.errors import RequestError, StorageError
from skyrl.utils.files.tar_folder import Limits, pack_folder, read_member, unpack_folder

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


@pytest.mark.parametrize(("suffix", "option"), [(".tar", "-tf"), (".tar.gz", "-tzf"), (".tgz", "-tzf")])
def test_any_program_reads_what_is_packed_and_a_folder_is_the_same_again(folder, tmp_path, suffix, option):
    archive = tmp_path / f"packed{suffix}"
    pack_folder(folder, archive)
    listed = subprocess.run(["tar", option, archive], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == sorted(FILES)
    assert suffix != ".tar" or FILES["b.safetensors"] in archive.read_bytes(), "it is compressed"
    unpack_folder(archive, tmp_path / "again", Limits(FILES, MOST))
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == FILES


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


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_what_does_not_belong_there_is_refused_and_not_written(tmp_path, kind, mode):
    info, message = HOSTILE[kind]
    archive_of(tmp_path / "hostile.tar", (info, b"{}"), mode=mode)
    with pytest.raises(RequestError, match=message):
        unpack_folder(tmp_path / "hostile.tar", tmp_path / "in" / "here", Limits(FILES, MOST))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["here", "hostile.tar", "in"]


def test_more_bytes_than_are_expected_are_refused(folder, tmp_path):
    pack_folder(folder, tmp_path / "packed.tar")
    with pytest.raises(RequestError, match=rf"more than the {MOST - 1} bytes"):
        unpack_folder(tmp_path / "packed.tar", tmp_path / "again", Limits(FILES, MOST - 1))


def test_a_file_that_is_far_too_large_is_not_opened(tmp_path):
    with (tmp_path / "large.tar").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(RequestError, match=rf"it has {2**30} bytes, and {MOST} are the most"):
        unpack_folder(tmp_path / "large.tar", tmp_path / "again", Limits(FILES, MOST))


@pytest.mark.parametrize("second", ["a.json", "./a.json"])
def test_the_same_name_twice_is_refused(tmp_path, second):
    twice = (member("a.json"), b"{}"), (member(second), b"[]")
    with pytest.raises(RequestError, match=r"holds 'a.json', where \['b.safetensors'\] are left"):
        unpack_folder(archive_of(tmp_path / "twice.tar", *twice), tmp_path / "again", Limits(FILES, MOST))


def test_a_sparse_file_which_is_larger_than_its_archive_is_refused(tmp_path):
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(2**24)
        file.write(b"x")
    subprocess.run(["tar", "--sparse", "-cf", "sparse.tar", "a.json"], cwd=tmp_path, check=True)
    with pytest.raises(RequestError, match=r"a.json in it is no plain file"):
        unpack_folder(tmp_path / "sparse.tar", tmp_path / "again", Limits(FILES, 2**30))


def test_a_file_that_is_missing_is_named(tmp_path):
    archive_of(tmp_path / "short.tar", (member("a.json"), b"{}"))
    with pytest.raises(RequestError, match=r"it lacks \['b.safetensors'\]"):
        unpack_folder(tmp_path / "short.tar", tmp_path / "again", Limits(FILES, MOST))


@pytest.mark.parametrize("mode", ["w:bz2", "w:xz"])
def test_an_archive_of_another_compression_is_refused(tmp_path, mode):
    archive_of(tmp_path / "packed.tar", (member("a.json"), b"{}"), mode=mode)
    with pytest.raises(RequestError, match="no whole tar, plain or gzipped"):
        unpack_folder(tmp_path / "packed.tar", tmp_path / "again", Limits(FILES, MOST))


# -- in gzip's format -----------------------------------------------------------------------------------------------


def test_what_gzip_has_made_small_is_read(folder, tmp_path):
    subprocess.run(["tar", "-czf", tmp_path / "small.tar.gz", "-C", folder, *FILES], check=True)
    assert (tmp_path / "small.tar.gz").stat().st_size < MOST / 4
    unpack_folder(tmp_path / "small.tar.gz", tmp_path / "again", Limits(FILES, MOST))
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == FILES


def bomb(path: Path, info: tarfile.TarInfo) -> Path:
    """A gigabyte of zeros after a header, in a megabyte."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(info.tobuf(format=tarfile.GNU_FORMAT))
        for _ in range(64):
            file.write(bytes(2**24))
    return path


@pytest.mark.full
@pytest.mark.parametrize("size", [2**30, 2])
def test_a_bomb_is_not_unpacked(tmp_path, size):
    """One whose header says what comes, and one whose zeros follow a small file."""
    archive = bomb(tmp_path / "bomb.tar.gz", member("a.json", size=size))
    ended = subprocess.run(
        [sys.executable, "-c", MEASURED, str(archive), str(tmp_path / "again")],
        capture_output=True,
        text=True,
        check=True,
    )
    refusal, grown_kib = ended.stdout.split("\n")[:2]
    assert "bytes that are the most here" in refusal or "lacks ['b.safetensors']" in refusal
    assert int(grown_kib) < 32 * 1024
    assert sum(path.stat().st_size for path in (tmp_path / "again").iterdir()) <= 2


def headers_bomb(path: Path, kind: str) -> Path:
    """A small archive with about 64 MiB of headers."""
    size = 2**26
    first, repeated = {
        "a long name": (member("x", type=tarfile.GNUTYPE_LONGNAME, size=size), bytes(2**10)),
        "a long link": (member("x", type=tarfile.GNUTYPE_LONGLINK, size=size), bytes(2**10)),
        "attributes": (member("x", type=tarfile.XHDTYPE, size=size), b"16 key=12345678\n" * 64),
        "attributes of all": (member("x", type=tarfile.XGLTYPE, size=size), b"16 key=12345678\n" * 64),
        "many folders": (member("."), member(".", type=tarfile.DIRTYPE).tobuf() * 2),
        "many long names": (member("x"), member("x", type=tarfile.GNUTYPE_LONGNAME).tobuf() * 2),
    }[kind]
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(first.tobuf(tarfile.GNU_FORMAT) if first.size else b"")
        for _ in range(size // 2**20):
            file.write(repeated * 2**10)
        file.write(member("a.json", size=0).tobuf() + bytes(2**10))
    return path


@pytest.mark.parametrize(
    "kind",
    ["a long name", "a long link", "attributes", "attributes of all", "many folders", "many long names"],
)
def test_headers_that_are_too_large_are_refused_and_not_kept_in_memory(tmp_path, kind):
    archive = headers_bomb(tmp_path / "bomb.tar.gz", kind)
    tracemalloc.start()
    with pytest.raises(RequestError, match=r"its headers have more than the \d+ bytes"):
        unpack_folder(archive, tmp_path / "again", Limits({"a.json"}, 2**27))
    highest = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert highest < 2**21


def test_attributes_that_take_long_to_search_are_refused(tmp_path):
    """Digits: tarfile's search in them takes the square of their number."""
    info = member("a.json", pax_headers={"comment": "1" * 2**15})
    with tarfile.open(tmp_path / "slow.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info)
    with pytest.raises(RequestError, match="its headers have more than"):
        unpack_folder(tmp_path / "slow.tar", tmp_path / "again", Limits({"a.json"}, MOST))


def test_a_member_of_a_negative_size_is_refused(tmp_path):
    (tmp_path / "negative.tar").write_bytes(member("a.json", size=-4096).tobuf(tarfile.GNU_FORMAT) + bytes(2**10))
    with pytest.raises(RequestError, match=r"a\.json in it is no plain file"):
        unpack_folder(tmp_path / "negative.tar", tmp_path / "again", Limits({"a.json"}, MOST))


def test_attributes_that_are_no_numbers_are_refused(tmp_path):
    info = member("a.json", pax_headers={"GNU.sparse.map": "many"})
    with tarfile.open(tmp_path / "wrong.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info)
    with pytest.raises(RequestError, match="no whole tar"):
        unpack_folder(tmp_path / "wrong.tar", tmp_path / "again", Limits({"a.json"}, MOST))


MEASURED = """
import resource, sys, pathlib
from skyrl.utils.files.tar_folder import Limits, unpack_folder
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    unpack_folder(*map(pathlib.Path, sys.argv[1:]), Limits({"a.json", "b.safetensors"}, 2**23))
except Exception as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_zeros_without_end_after_the_files_are_not_read_to_their_end(folder, tmp_path):
    pack_folder(folder, tmp_path / "packed.tar")
    with gzip.open(tmp_path / "bomb.tar.gz", "wb", compresslevel=1) as file:
        file.write((tmp_path / "packed.tar").read_bytes() + bytes(2**20))
    with pytest.raises(RequestError, match=rf"it unpacks to more than the {MOST} bytes"):
        unpack_folder(tmp_path / "bomb.tar.gz", tmp_path / "again", Limits(FILES, MOST))


@pytest.mark.parametrize("how", ["a second member", "bytes after the tar", "bytes after gzip"])
def test_what_follows_the_end_is_refused(folder, tmp_path, how):
    archive = tmp_path / "packed.tar.gz"
    pack_folder(folder, tmp_path / "plain.tar")
    plain, more = (tmp_path / "plain.tar").read_bytes(), b"more" * 100
    archive.write_bytes(
        {
            "a second member": gzip.compress(plain) + gzip.compress(plain),
            "bytes after the tar": gzip.compress(plain + more),
            "bytes after gzip": gzip.compress(plain) + more,
        }[how]
    )
    with pytest.raises(RequestError, match=r"something follows|no whole tar"):
        unpack_folder(archive, tmp_path / "again", Limits(FILES, MOST))


def test_a_gzipped_archive_whose_checksum_differs_is_refused(folder, tmp_path):
    pack_folder(folder, tmp_path / "packed.tgz")
    whole = bytearray((tmp_path / "packed.tgz").read_bytes())
    whole[-8] ^= 1
    (tmp_path / "packed.tgz").write_bytes(bytes(whole))
    with pytest.raises(RequestError, match="no whole tar"):
        unpack_folder(tmp_path / "packed.tgz", tmp_path / "again", Limits(FILES, MOST))


def packed_as_a_folder(folder: Path, archive: Path, how: str) -> Path:
    """An archive whose first member is the folder itself."""
    if how == "tar":
        subprocess.run(["tar", "-czf", archive, "-C", folder, "."], check=True)
    else:
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(folder, arcname="." if how == "dot" else "")
    return archive


@pytest.mark.parametrize("how", ["empty", "dot", "tar"])
def test_an_archive_of_the_folder_itself_is_read(folder, tmp_path, how):
    archive = packed_as_a_folder(folder, tmp_path / "packed.tar.gz", how)
    assert read_member(archive, "a.json", 2, Limits(FILES, MOST)) == FILES["a.json"]
    unpack_folder(archive, tmp_path / "again", Limits(FILES, MOST))
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == FILES


# -- names that may be there, and one file alone --------------------------------------------------------------------


def test_files_that_may_be_there_are_taken_and_others_are_not(folder, tmp_path):
    (folder / "tokenizer.json").write_bytes(b"{}")
    pack_folder(folder, tmp_path / "packed.tar")
    unpack_folder(tmp_path / "packed.tar", tmp_path / "again", Limits(FILES, 2 * MOST, ["tokenizer*"]))
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == b"{}"
    with pytest.raises(RequestError, match=r"holds 'tokenizer\.json'"):
        unpack_folder(tmp_path / "packed.tar", tmp_path / "refused", Limits(FILES, 2 * MOST))


def test_a_pattern_lets_no_path_through(tmp_path):
    archive_of(tmp_path / "hostile.tar", (member("tokenizer/../../x"), b"{}"))
    with pytest.raises(RequestError, match=r"holds 'tokenizer/\.\./\.\./x'"):
        unpack_folder(tmp_path / "hostile.tar", tmp_path / "again", Limits((), MOST, ["tokenizer*"]))


def test_one_file_is_read_alone(folder, tmp_path):
    pack_folder(folder, tmp_path / "packed.tar")
    assert read_member(tmp_path / "packed.tar", "a.json", 2, Limits(FILES, MOST)) == FILES["a.json"]
    with pytest.raises(RequestError, match=r"b\.safetensors in it has 10240 bytes, and 100 are the most"):
        read_member(tmp_path / "packed.tar", "b.safetensors", 100, Limits(FILES, MOST))


def test_an_archive_that_ends_early_is_refused(folder, tmp_path):
    pack_folder(folder, tmp_path / "packed.tar")
    whole = (tmp_path / "packed.tar").read_bytes()
    (tmp_path / "packed.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RequestError, match="no whole tar"):
        unpack_folder(tmp_path / "packed.tar", tmp_path / "again", Limits(FILES, MOST))


def test_an_archive_that_is_not_there_is_a_matter_of_storage(tmp_path):
    with pytest.raises(StorageError, match=r"nowhere\.tar cannot be read"):
        unpack_folder(tmp_path / "nowhere.tar", tmp_path / "again", Limits(FILES, MOST))


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
