"""Streaming downloads of checkpoints in pieces of constant size: single files, or all files as a tar archive.

A file with a wrong hash is never sent completely: its last piece is sent only after the hash was verified.
"""

import hashlib
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from skyrl.errors import DamagedFiles, UnknownName
from skyrl.utils.files.atomic_folders import StoredFile
from skyrl.utils.files.stored_folders import open_stored

PIECE_BYTES = 2**20
COMPLETE = "checkpoint_complete"
"""Name of the last member of an archive, which is empty. Older clients look for it."""


@dataclass(frozen=True)
class Stream:
    """Bytes to send. The total size is known before the first byte is read."""

    size_bytes: int
    pieces: Iterator[bytes]


def stream_file(folder: str, name: str) -> Stream:
    """Stream a file of a checkpoint. Raises `UnknownName`, or `StorageError`."""
    return _opened(_file(folder, name))


def stream_archive(folder: str) -> Stream:
    """Stream all files of a checkpoint as a tar archive. Raises `StorageError`."""
    return _opened(_archive(folder))


def _opened(parts: Iterator[int | bytes]) -> Stream:
    """Start a generator, which opens its files, yields the total size, and then yields the pieces."""
    size = next(parts)
    assert isinstance(size, int)
    return Stream(size, parts)  # pyright: ignore[reportArgumentType]


def _file(folder: str, name: str) -> Iterator[int | bytes]:
    with open_stored(folder) as files:
        file = next((file for file in files if file.name == name), None)
        if file is None:
            raise UnknownName(f"the checkpoint has no file {name[:300]!r}; ask for its links again")
        yield file.size_bytes
        yield from _checked(file)


def _archive(folder: str) -> Iterator[int | bytes]:
    with open_stored(folder) as files:
        entries = sum(tarfile.BLOCKSIZE + file.size_bytes + _padding(file.size_bytes) for file in files)
        yield entries + tarfile.BLOCKSIZE * 3
        for file in files:
            yield _header(file.name, file.size_bytes)
            yield from _checked(file)
            yield bytes(_padding(file.size_bytes))
        yield _header(COMPLETE, 0) + bytes(2 * tarfile.BLOCKSIZE)


def _header(name: str, size_bytes: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size_bytes, 0o644
    return entry.tobuf(tarfile.GNU_FORMAT)


def _padding(size_bytes: int) -> int:
    return -size_bytes % tarfile.BLOCKSIZE


def _checked(file: StoredFile) -> Iterator[bytes]:
    """Yield the bytes of a file. Raises `DamagedFiles` instead of yielding the last piece if the hash is wrong."""
    hashed, held = hashlib.sha256(), b""
    while piece := file.reader.read(PIECE_BYTES):
        hashed.update(piece)
        if held:
            yield held
        held = piece
    if hashed.hexdigest() != file.sha256:
        raise DamagedFiles(f"{file.name} is damaged: its hash differs from the manifest; use another checkpoint")
    if held:
        yield held
