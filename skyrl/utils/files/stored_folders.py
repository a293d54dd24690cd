"""Atomic folders at a path on disk or at a URL in a bucket.

A folder for a bucket is first written to disk, below the user's data folder, and removed after the upload.
"""

import io
import posixpath
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast
from uuid import uuid4

from skyrl.errors import StorageError
from skyrl.utils.files.atomic_folders import (
    MANIFEST,
    TEMPORARY,
    Content,
    Parts,
    StoredFile,
    Written,
    copy_folder,
    folder_bytes,
    inspect_folder,
    open_folder,
    remove_folder,
    write_folder,
)
from skyrl.utils.files.object_store import ObjectStore, Stored, is_url
from skyrl.utils.files.paths import bucket_folder
from skyrl.utils.files.remote_folders import (
    copy_remote,
    fetch_folder,
    inspect_remote,
    open_remote,
    read_remote_file,
    remote_bytes,
    remote_keys,
    remove_remote,
    send_folder,
)


def write_stored(path: str, files: Mapping[str, Content], parts: Parts | None = None) -> Written:
    """Write a folder with these files, and those of `parts`, to a path or URL, replacing an existing one.

    Raises:
        StorageError: A write to the disk or the store fails. An existing folder is unchanged.
    """
    if not is_url(path):
        return write_folder(path, files, parts)
    work = bucket_folder(path)
    temporary = work.with_name(f".{uuid4().hex}{TEMPORARY}")
    try:
        write_folder(temporary, files, parts)
        return send_folder(temporary, *_place(path))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def on_disk(path: str, parent: Path) -> Iterator[str]:
    """Context with the folder on disk: the folder itself, or a temporary copy in `parent` of a folder in a bucket.

    Raises `StorageError` with the URL, also for a damaged folder.
    """
    if not is_url(path):
        yield path
        return
    folder = parent / f".{uuid4().hex}{TEMPORARY}"
    try:
        fetch_folder(*_place(path), folder)
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def inspect_stored(path: str) -> Written | None:
    """Return the result of `write_stored` for a folder; None unless all its files exist with full length.

    Raises `StorageError` if the store fails.
    """
    return inspect_remote(*_place(path)) if is_url(path) else inspect_folder(path)


def read_stored(path: str, file: str) -> bytes | None:
    """Return the verified content of a small file of a folder in a bucket; None if it is missing.

    Raises `StorageError`.
    """
    return read_remote_file(*_place(path), file)


@contextmanager
def open_stored(path: str) -> Iterator[list[StoredFile]]:
    """Context with the files of a folder; each can be read once. Raises the errors of `open_folder`."""
    if not is_url(path):
        with open_folder(path) as files:
            yield files
        return
    yield [
        StoredFile(name, size, sha256, cast(BinaryIO, io.BufferedReader(_Chunks(chunks), 2**20)))
        for name, size, sha256, chunks in open_remote(*_place(path))
    ]


def sign_stored(path: str, seconds: float) -> dict[str, str | None]:
    """Return a public URL of each file of a folder, valid for `seconds`. None if the folder is on disk or the store
    cannot sign.

    Raises the errors of `open_stored`.
    """
    if not is_url(path):
        with open_folder(path) as files:
            return {file.name: None for file in files}
    store, name = _place(path)
    return {file: store.sign(key, seconds) for file, key in remote_keys(store, name).items()}


def copy_stored(source: str, path: str) -> None:
    """Copy a folder to a path or URL where nothing exists. Raises `StorageError`."""
    if is_url(source) and is_url(path) and _bucket(source) == _bucket(path):
        store, name = _place(source)
        copy_remote(store, name, _place(path)[1])
        return
    if is_url(source) or is_url(path):
        raise StorageError(f"{source} cannot be copied to {path}: they are not in one bucket")
    copy_folder(source, path)


def remove_stored(path: str) -> int:
    """Remove a folder, atomically for readers. Returns its size in bytes. Raises `StorageError`."""
    return remove_remote(*_place(path)) if is_url(path) else remove_folder(path)


def stored_bytes(path: str) -> int:
    """Return the total size of a folder's files in bytes. Raises `StorageError` if the store fails."""
    return remote_bytes(*_place(path)) if is_url(path) else folder_bytes(Path(path))


def modified_at(path: str) -> float:
    """Return the Unix time in seconds at which a folder was written. Raises `StorageError`, or OSError of the disk."""
    if not is_url(path):
        return Path(path).stat().st_mtime
    store, name = _place(path)
    return max((stored.modified for stored in store.list(name)), default=0.0)


class BucketFolder(NamedTuple):
    """A folder in a bucket, which may be incomplete."""

    is_whole: bool
    size_bytes: int
    modified: float
    """Unix time, in seconds, of the last write of an object of the folder."""


def folders_below(url: str, depth: int) -> dict[str, BucketFolder]:
    """Return the folders `depth` levels below a URL, by relative name. Raises `StorageError`."""
    found: dict[str, BucketFolder] = {}
    for key, stored in _objects_below(url):
        parts = key.split("/")
        if len(parts) > depth and not parts[0].startswith("."):
            name, is_manifest = "/".join(parts[:depth]), parts[depth:] == [MANIFEST]
            before = found.get(name, BucketFolder(False, 0, 0.0))
            found[name] = BucketFolder(
                before.is_whole or is_manifest,
                before.size_bytes + stored.size,
                max(before.modified, stored.modified),
            )
    return found


def keys_below(url: str) -> list[str]:
    """Return the keys of all objects below a URL, relative to it. Raises `StorageError`."""
    return [key for key, _ in _objects_below(url)]


def remove_below(url: str) -> None:
    """Remove all objects below a URL. Raises `StorageError`."""
    store, name = _place(url)
    store.delete(stored.key for stored in store.list(name))


def _objects_below(url: str) -> Iterator[tuple[str, Stored]]:
    store, name = _place(url)
    prefix = "" if name == "." else name
    for stored in store.list(prefix):
        yield stored.key[len(prefix) + 1 if prefix else 0 :], stored


def _bucket(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def _place(url: str) -> tuple[ObjectStore, str]:
    """Return (bucket of a URL, name of the folder in it)."""
    bucket = _bucket(url)
    return ObjectStore(bucket), posixpath.normpath(url.removeprefix(bucket).strip("/"))


class _Chunks(io.RawIOBase):
    """A file whose content arrives as a sequence of chunks."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks, self._left = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        target = memoryview(cast(bytearray, buffer))
        if not self._left:
            self._left = memoryview(next(self._chunks, b""))
        count = min(len(target), len(self._left))
        target[:count] = self._left[:count]
        self._left = self._left[count:]
        return count
