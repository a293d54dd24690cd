"""Atomic folders: a folder is either complete or absent.

`write_folder` writes all files to a temporary folder, adds a manifest with their hashes, flushes everything to disk and
renames the folder into place. `read_folder` and `open_checked` reject a folder whose manifest or hashes do not match,
and move it away. A folder that is being replaced is kept beside the new one for a moment. If a crash leaves only the
old one, it is used. Only local paths are supported; URLs of buckets are rejected.
"""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast
from uuid import uuid4

from skyrl.errors import DamagedFiles, RequestError, StorageError
from skyrl.utils.failpoints import crash_point

MANIFEST = "manifest.json"
TEMPORARY = ".tmp"
REPLACED = ".old"
QUARANTINED = ".quarantined"
"""Suffixes of folders that are not for reading. Their names start with a dot."""
MAKE_TRIES = 100
"""Attempts to create a folder whose parents are removed concurrently."""
PART_BYTES = 2**24
"""Bytes that are hashed at a time."""
LONGEST_NAME = 200
"""Maximum number of characters kept of a name before a suffix is added. File systems limit names to 255 bytes."""


def local_path(path: str | Path) -> Path:
    """Return a path as a local one. Raises `RequestError` for URLs such as s3://."""
    if "://" in str(path):
        scheme = str(path).split("://", 1)[0]
        raise RequestError(f"path={path}: {scheme}:// is no local path; use a path on a local or mounted disk")
    return Path(path)


Content = bytes | Callable[[BinaryIO], object]
"""Content of a file, or a function that writes it piece by piece."""


Entries = Mapping[str, Mapping[str, Any]]
"""Entries of a manifest by file: size and hash."""
Parts = Callable[[Path], Entries]
"""Writes additional files into a folder, in other processes (`write_part`), and returns their entries."""
Hashes = Callable[[Mapping[Path, int]], Mapping[Path, str]]
"""Computes the hashes (sha256, hex) of files, in other processes. Its argument is their sizes in bytes."""


class Written(NamedTuple):
    """A folder on disk."""

    size_bytes: int
    """Total size of its files in bytes, without the manifest."""
    digest: str
    """sha256 (hex) of its manifest, which contains the hashes of all files."""


class _Damaged(Exception):
    """The contents of a folder do not match its manifest."""


def write_folder(path: str | Path, files: Mapping[str, Content], parts: Parts | None = None) -> Written:
    """Write a folder with these files to `path`, replacing an existing one.

    Args:
        path: The folder.
        files: Contents by name.
        parts: Writer of additional files.

    Raises:
        StorageError: A write fails. An existing folder at `path` is unchanged.
    """
    with replacing_folder(path) as temporary:
        return write_files(temporary, files, {} if parts is None else parts(temporary))


def write_files(folder: Path, files: Mapping[str, Content], written: Entries | None = None) -> Written:
    """Write files and a manifest to a folder from `replacing_folder`. The manifest also lists the `written` files."""
    entries = dict(written or {})
    for name, content in files.items():
        entries[name] = _write_file(folder / name, content)
        crash_point("storage: files half written")
    manifest = json.dumps(entries, indent=1).encode()
    _write_file(folder / MANIFEST, manifest)
    return Written(sum(entry["bytes"] for entry in entries.values()), hashlib.sha256(manifest).hexdigest())


class PartFile:
    """A file of a folder that another process creates, written piece by piece. Methods raise `StorageError`."""

    def __init__(self, path: Path):
        self._path = path
        with self._failures():
            self._file = path.open("wb")
        self._hashing = _Hashing(self._file)

    def write(self, data: Any) -> None:
        """Write the next bytes."""
        with self._failures():
            self._hashing.write(data)

    def close(self) -> dict[str, Any]:
        """Flush the file to disk and close it. Returns its entry in the folder's manifest."""
        with self._failures(), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return self._hashing.entry()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _unwritable(self._path, error) from error


def write_part(path: Path, content: Content) -> dict[str, Any]:
    """Write a file of a folder that another process creates. Returns its entry. Raises `StorageError`."""
    try:
        return _write_file(path, content)
    except OSError as error:
        raise _unwritable(path, error) from error


def add_manifest(folder: Path) -> None:
    """Add a manifest to a folder that has none. No other process may read the folder yet."""
    entries = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        entries[path.name] = {"sha256": digest, "bytes": path.stat().st_size}
    (folder / MANIFEST).write_text(json.dumps(entries, indent=1))


def replace_file(path: Path, content: Content) -> None:
    """Write a file to `path` atomically.

    Raises:
        StorageError: The write fails. An existing file at `path` is unchanged.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        _make_folder(path.parent)
        _write_file(temporary, content)
        os.replace(temporary, path)
        _flush_folder(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error


def copy_folder(source: str | Path, path: str | Path) -> None:
    """Copy a folder to `path`. Files are hard-linked if the disk supports it.

    Raises:
        DamagedFiles: The source is missing or incomplete.
        StorageError: A read or a write fails.
    """
    with _opened(local_path(source)) as (_, handle), replacing_folder(path) as temporary:
        try:
            manifest = _read_file(handle, MANIFEST)
            for name in _entries(manifest):
                _share_file(handle, name, temporary / name)
        except _Damaged as damage:
            raise DamagedFiles(f"{source} is damaged: {damage}; use another checkpoint") from damage
        _write_file(temporary / MANIFEST, manifest)


@contextmanager
def replacing_folder(path: str | Path) -> Iterator[Path]:
    """Context with a new folder for writing, which replaces `path` on success.

    Raises:
        StorageError: A write fails. An existing folder at `path` is unchanged.
    """
    target = local_path(path)
    temporary = target.with_name(f".{uuid4().hex}{TEMPORARY}")
    try:
        _make_temporary(temporary)
        yield temporary
        _flush_folder(temporary)
        crash_point("storage: files written, not in place")
        _put_in_place(temporary, target)
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class StoredFile(NamedTuple):
    """An open file of a folder."""

    name: str
    size_bytes: int
    sha256: str
    """Hash in the manifest. The reader must compare it."""
    reader: BinaryIO


@contextmanager
def open_folder(path: str | Path, digest: str | None = None) -> Iterator[list[StoredFile]]:
    """Context with the open files of a folder. They stay readable even if the folder is replaced or removed.

    Args:
        path: The folder.
        digest: Expected sha256 (hex) of the manifest, if known.

    Raises:
        DamagedFiles: The folder or one of its files is missing or has the wrong length, or the manifest differs.
        StorageError: The disk fails.
    """
    with ExitStack() as stack:
        files = []
        with _opened(local_path(path)) as (_, handle):
            try:
                for name, entry in _entries(_read_manifest(handle, path, digest)).items():
                    reader = stack.enter_context(_open_file(handle, name))
                    if os.fstat(reader.fileno()).st_size != entry["bytes"]:
                        raise _Damaged(f"{name} has another length than the manifest says")
                    files.append(StoredFile(name, entry["bytes"], entry["sha256"], reader))
            except _Damaged as damage:
                raise DamagedFiles(f"{path} is damaged: {damage}; use another checkpoint") from damage
        yield files


class CheckedFiles(Mapping[str, bytes]):
    """Files of a folder whose hashes are right. Their contents are read when they are asked for.

    Args:
        path: The folder.
        files: Open files by name.
        same_elsewhere: True if other processes found these hashes under the same path.
    """

    def __init__(self, path: Path, files: Mapping[str, BinaryIO], same_elsewhere: bool):
        self._path, self._files = path, files
        self.same_elsewhere = same_elsewhere

    def __getitem__(self, name: str) -> bytes:
        file = self.open(name)
        try:
            file.seek(0)
            return file.read()
        except OSError as error:
            raise _unreadable(name, error) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def open(self, name: str) -> BinaryIO:
        """A file, for reading in parts."""
        return self._files[name]

    def check_unmoved(self) -> None:
        """Raise `StorageError` if the folder's path now names other files, which another process may have read."""
        for name, file in self._files.items():
            try:
                same = os.path.samestat(os.stat(self._path / name), os.fstat(file.fileno()))
            except OSError:
                same = False
            if not same:
                raise StorageError(f"{self._path} was replaced or removed while it was read; try again")


@contextmanager
def open_checked(path: str | Path, digest: str | None = None, hashes: Hashes | None = None) -> Iterator[CheckedFiles]:
    """Context with the files in the manifest of `path`, checked against their hashes.

    Args:
        path: The folder.
        digest: Expected sha256 (hex) of the manifest, if known.
        hashes: Computes the hashes of the files; None: this process does, or if others find other hashes.

    Raises the errors of `read_folder`.
    """
    folder = local_path(path)
    while True:
        with ExitStack() as stack:
            files = None
            with suppress(DamagedFiles):
                files = stack.enter_context(open_folder(folder, digest))
            if files is not None and _are_intact(folder, files, hashes):
                yield CheckedFiles(folder, {file.name: file.reader for file in files}, hashes is not None)
                return
        _read(folder, digest, _check)  # raises a detailed error, unless the folder was replaced in the meantime
        hashes = None


def read_folder(path: str | Path, digest: str | None = None) -> dict[str, bytes]:
    """Return all files in the manifest of `path`, checked against their hashes.

    Args:
        path: The folder.
        digest: Expected sha256 (hex) of the manifest, if known.

    Raises:
        DamagedFiles: The folder or one of its files is missing or damaged. A damaged folder is renamed with the suffix
            `.quarantined`, so that it is never used again.
        StorageError: The disk fails.
    """
    return _read(path, digest, _checked)


def inspect_folder(path: str | Path) -> Written | None:
    """Return the result of `write_folder` for this folder; None unless all its files exist with full length."""
    with suppress(StorageError, OSError, _Damaged), _opened(local_path(path)) as (_, handle):
        manifest = _read_file(handle, MANIFEST)
        sizes = {name: entry["bytes"] for name, entry in _entries(manifest).items()}
        if all(os.stat(name, dir_fd=handle).st_size == size for name, size in sizes.items()):
            return Written(sum(sizes.values()), hashlib.sha256(manifest).hexdigest())
    return None


def remove_folder(path: str | Path) -> int:
    """Remove a folder, atomically for readers. Returns its size in bytes; 0 if there was none."""
    folder, freed = local_path(path), 0
    for place in (_aside(folder), folder):
        doomed = place.with_name(f".{uuid4().hex}{TEMPORARY}")
        try:
            os.rename(place, doomed)
        except FileNotFoundError:
            continue
        freed += folder_bytes(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return freed


def folder_bytes(path: Path) -> int:
    """Return the total size of the files in a folder, in bytes. Files may be removed concurrently."""
    total = 0
    for parent, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def tidy(parent: Path) -> None:
    """Complete or clean up interrupted `write_folder` and `remove_folder` calls in `parent`.

    Requires that no process writes to `parent`.
    """
    for path in [path for path in parent.iterdir() if path.name.startswith(".")]:
        if path.suffix == REPLACED:
            target = path.with_name(path.name.removeprefix(".").removesuffix(REPLACED))
            if not target.exists():
                os.rename(path, target)
        if path.suffix in (REPLACED, TEMPORARY):
            shutil.rmtree(path, ignore_errors=True)


def _aside(target: Path) -> Path:
    """Return the path of a folder while it is being replaced."""
    return target.with_name(f".{target.name}{REPLACED}")


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[Path, int]]:
    """Context with (path, file descriptor) of a folder.

    Reads through the descriptor always see this folder, even if it is renamed or replaced.
    """
    error: OSError | None = None
    for place in (folder, _aside(folder), folder):
        try:
            handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as missing:
            error = missing
            continue
        try:
            yield place, handle
        finally:
            os.close(handle)
        return
    why = error.strerror if error else None
    kind = DamagedFiles if isinstance(error, FileNotFoundError | NotADirectoryError) else StorageError
    raise kind(f"{folder} is missing or cannot be opened ({why}); use another checkpoint") from error


def _read_file(handle: int, name: str) -> bytes:
    with _open_file(handle, name) as file:
        try:
            return file.read()
        except OSError as error:
            raise _unreadable(name, error) from error


def _open_file(handle: int, name: str) -> io.BufferedReader:
    try:
        return open(os.open(name, os.O_RDONLY, dir_fd=handle), "rb")
    except (FileNotFoundError, IsADirectoryError):
        raise _Damaged(f"{name} is missing") from None
    except OSError as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: OSError) -> StorageError:
    """Return the error for a disk failure, which does not mean that the file is damaged."""
    return StorageError(f"{name} of a checkpoint cannot be read: {error.strerror or error}; try again")


def _entries(manifest: bytes) -> dict[str, dict[str, Any]]:
    """Return the entries of a manifest, by file."""
    try:
        entries = json.loads(manifest)
        if all(
            os.path.basename(name) == name and isinstance(entry["sha256"], str) and isinstance(entry["bytes"], int)
            for name, entry in entries.items()
        ):
            return entries
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise _Damaged("its manifest is incomplete")


Given = TypeVar("Given")


def _read(path: str | Path, digest: str | None, use: Callable[[int, str, str], Given]) -> dict[str, Given]:
    """Call `use` with the folder's descriptor, the name and the hash of each file. Raises as `read_folder` does."""
    folder = local_path(path)
    while True:
        with _opened(folder) as (place, handle):
            try:
                manifest = _read_manifest(handle, folder, digest)
                return {name: use(handle, name, entry["sha256"]) for name, entry in _entries(manifest).items()}
            except _Damaged as damage:
                if os.path.exists(place) and os.path.samestat(os.stat(place), os.fstat(handle)):
                    moved = _quarantine(place)
                    raise DamagedFiles(
                        f"{folder} is damaged: {damage}; quarantined at {moved}; use another checkpoint"
                    ) from damage
                # It was replaced or removed while it was being read.


def _read_manifest(handle: int, folder: str | Path, digest: str | None) -> bytes:
    manifest = _read_file(handle, MANIFEST)
    if digest is not None and hashlib.sha256(manifest).hexdigest() != digest:
        raise DamagedFiles(f"{folder} is not what was saved there: its manifest differs; use another one")
    return manifest


def _checked(handle: int, name: str, sha256: str) -> bytes:
    data = _read_file(handle, name)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise _wrong_hash(name)
    return data


def _check(handle: int, name: str, sha256: str) -> None:
    """Raise `_Damaged` if a file has another hash. Reads it in small parts."""
    with _open_file(handle, name) as file:
        if _hash(file, name) != sha256:
            raise _wrong_hash(name)


def _wrong_hash(name: str) -> _Damaged:
    return _Damaged(f"the hash of {name} differs from the manifest")


def _are_intact(folder: Path, files: list[StoredFile], hashes: Hashes | None) -> bool:
    """Return True if open files have the hashes of their manifest."""
    if hashes is None:
        return all(_hash(file.reader, file.name) == file.sha256 for file in files)
    found = hashes({folder / file.name: file.size_bytes for file in files})
    return all(found[folder / file.name] == file.sha256 for file in files)


def _hash(file: BinaryIO, name: str) -> str:
    try:
        return hashlib.file_digest(cast(io.BufferedReader, file), "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(name, error) from error


def hash_of(path: Path) -> str:
    """Return the hash (sha256, hex) of a file that another process opened. Raises `StorageError`."""
    try:
        with path.open("rb") as file:
            return _hash(file, path.name)
    except OSError as error:
        raise _unreadable(str(path), error) from error


def hash_in_parts(path: Path) -> Generator[int, None, str]:
    """Compute `hash_of` a large file. Yields the bytes of each part."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(PART_BYTES):
                digest.update(part)
                yield len(part)
    except OSError as error:
        raise _unreadable(str(path), error) from error
    return digest.hexdigest()


def _quarantine(folder: Path) -> Path:
    """Rename a damaged folder. Its modification time is set to now."""
    moved = folder.with_name(f".{folder.name[:LONGEST_NAME]}.{uuid4().hex[:8]}{QUARANTINED}")
    try:
        os.rename(folder, moved)
        os.utime(moved)
    except OSError:  # the hashes reject it every time
        return folder
    return moved


class _Hashing(io.RawIOBase):
    """Writes to a file, and computes hash and size."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._hash = hashlib.sha256()
        self._bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self._bytes += len(data)
        return self._file.write(data)

    def entry(self) -> dict[str, Any]:
        """Return the entry of the file in the manifest."""
        return {"sha256": self._hash.hexdigest(), "bytes": self._bytes}


def _write_file(path: Path, content: Content) -> dict[str, Any]:
    """Write a file and flush it to disk. Returns its manifest entry."""
    with open(path, "wb") as file:
        hashing = _Hashing(file)
        if callable(content):
            content(cast(BinaryIO, hashing))
        else:
            hashing.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashing.entry()


def _share_file(folder: int, name: str, path: Path) -> None:
    """Hard-link a file of an open folder, or copy it if the disk does not support links."""
    try:
        os.link(name, path, src_dir_fd=folder)
    except FileNotFoundError:
        raise _Damaged(f"{name} is missing") from None
    except OSError:
        with _open_file(folder, name) as source:
            _write_file(path, lambda target: shutil.copyfileobj(source, target))


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot write {path}: {error.strerror or error}; free space or check permissions")


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename a folder into place.

    An existing folder is moved away first, because a rename cannot replace a nonempty folder.
    """
    old = _aside(target)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
        crash_point("storage: older folder moved aside")
    try:
        os.rename(temporary, target)
    except OSError:
        with suppress(FileNotFoundError):
            os.rename(old, target)
        raise
    _flush_folder(target.parent)
    crash_point("storage: folder in place")
    shutil.rmtree(old, ignore_errors=True)


def _make_temporary(path: Path) -> None:
    """Create a folder and its parents. Retries if an empty parent is removed concurrently."""
    for tries_left in reversed(range(MAKE_TRIES)):
        try:
            _make_folder(path.parent)
            path.mkdir()
            return
        except FileNotFoundError:
            if not tries_left:
                raise


def _make_folder(path: Path) -> None:
    """Create a folder and its parents, and flush their names to disk."""
    if path.is_dir():
        return
    _make_folder(path.parent)
    path.mkdir(exist_ok=True)
    _flush_folder(path.parent)


def _flush_folder(path: Path) -> None:
    """Flush the names in a folder to disk."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
