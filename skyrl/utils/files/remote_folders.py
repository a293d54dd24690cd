"""Atomic folders in a bucket, like `atomic_folders` on disk.

A folder is created on disk and uploaded file by file. It exists when its `manifest.json` does. The manifest is uploaded
last, and only if no other process has uploaded one in the meantime. After an interruption, complete objects are not
uploaded again. A folder that replaces another one appears at once when its manifest is uploaded; the old files keep
their objects until then. Folders may contain folders; one manifest lists all files.

The manifest names the object of each file: `HASH-NAME`. HASH depends on the content and on the manifest that the upload
replaces, so a late request of an older upload neither overwrites nor deletes an object of a newer one. Earlier versions
gave objects the names of the files. Such folders can still be read.
"""

import hashlib
import json
import posixpath
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from skyrl.errors import DamagedFiles, StorageError
from skyrl.utils.failpoints import crash_point
from skyrl.utils.files.atomic_folders import MANIFEST, TEMPORARY, Written
from skyrl.utils.files.object_store import ObjectStore, PreconditionFailed, Stored

OBJECT = "object"
"""Key in a manifest's entry for the name of the object. If it is missing, the object has the name of the file."""
_HASH = re.compile(r"(?<=/)[0-9a-f]{16}-(?=[^/]*$)")
Entries = Mapping[str, Mapping[str, Any]]


def send_folder(folder: Path, store: ObjectStore, name: str) -> Written:
    """Upload a folder, replacing the folder of this name if there is one.

    Args:
        folder: Folder on disk, with or without a manifest.
        store: Target store.
        name: Name in the store.

    Raises:
        StorageError: The upload fails. An existing folder at `name` is unchanged.
    """
    older = store.find(_key(name, MANIFEST))
    kept = _entries(store, name) if older is not None else {}
    replaced = hashlib.sha256(json.dumps(kept).encode()).hexdigest() if older is not None else ""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    entries: dict[str, dict[str, Any]] = {}
    there = {stored.key: stored.size for stored in store.list(name)}
    own = paths.pop(MANIFEST, None)
    for file, path in paths.items():
        entries[file] = _send_file(store, name, file, path, kept.get(file), replaced, there)
        crash_point("bucket: files half sent")
    entries = _in_order(entries, own)
    _send_manifest(store, name, entries, older)
    crash_point("bucket: folder in place")
    store.delete(_unused(name, entries, kept, there))
    return _written(entries)


def fetch_folder(store: ObjectStore, name: str, folder: Path) -> None:
    """Download a folder that `send_folder` has uploaded. `folder` must not exist. A failure leaves nothing on the disk.

    Raises:
        DamagedFiles: The folder or one of its files is missing or damaged.
        StorageError: The store or the disk fails.
    """
    temporary = folder.with_name(f".{uuid4().hex}{TEMPORARY}")
    try:
        with _disk(folder):
            temporary.mkdir(parents=True)
            entries = _entries(store, name)
            for file, entry in entries.items():
                _fetch_file(store, name, file, entry, temporary / file)
            direct = {file: _local(entry) for file, entry in entries.items() if "/" not in file}
            (temporary / MANIFEST).write_text(json.dumps(direct, indent=1))
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fetch_file(store: ObjectStore, name: str, file: str, entry: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        found = store.get_file(_key(name, _object(file, entry)), path, entry["bytes"])
    except FileNotFoundError as error:
        raise _damaged(store, name, f"{file} is missing") from error
    if found != entry["sha256"]:
        raise _damaged(store, name, f"the hash of {file} differs from the manifest")


def inspect_remote(store: ObjectStore, name: str) -> Written | None:
    """Return the result of `send_folder` for a folder; None unless all its files exist with full length."""
    manifest = store.get(_key(name, MANIFEST))
    if manifest is None:
        return None
    there = {stored.key: stored.size for stored in store.list(name)}
    entries = _parsed(store, name, manifest)
    if any(there.get(_key(name, _object(file, entry))) != entry["bytes"] for file, entry in entries.items()):
        return None
    return _written(entries)


def open_remote(store: ObjectStore, name: str) -> list[tuple[str, int, str, Iterator[bytes]]]:
    """Return (file, size, hash, content) of each file of a folder. The reader must compare the hash.

    Raises:
        DamagedFiles: The folder or one of its files is missing or has the wrong length.
        StorageError: The store fails, also while the content is read.
    """
    return [
        (file, entry["bytes"], entry["sha256"], _chunks(store, _key(name, _object(file, entry)), entry["bytes"]))
        for file, entry in _checked_entries(store, name).items()
    ]


def remote_keys(store: ObjectStore, name: str) -> dict[str, str]:
    """Return the object key of each file of a folder. Raises the errors of `open_remote`."""
    return {file: _key(name, _object(file, entry)) for file, entry in _checked_entries(store, name).items()}


def _chunks(store: ObjectStore, key: str, size: int) -> Iterator[bytes]:
    try:
        yield from store.chunks(key, size)
    except FileNotFoundError as error:
        raise DamagedFiles(f"{store.url}/{key} was removed while it was read; use another checkpoint") from error


def read_remote_file(store: ObjectStore, name: str, file: str) -> bytes | None:
    """Return the verified content of a small file of a folder; None if the folder or the file does not exist."""
    manifest = store.get(_key(name, MANIFEST))
    entry = {} if manifest is None else _parsed(store, name, manifest).get(file, {})
    if not entry:
        return None
    content = store.get(_key(name, _object(file, entry)))
    if content is None or hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise _damaged(store, name, f"the hash of {file} differs from the manifest")
    return content


def remote_folders(store: ObjectStore, prefix: str = "") -> dict[str, bool]:
    """Return the folders directly below a prefix: True for complete folders, False for incomplete ones."""
    found: dict[str, bool] = {}
    for stored in store.list(prefix):
        name, separator, file = stored.key[len(prefix) + 1 if prefix else 0 :].partition("/")
        if separator:
            found[name] = found.get(name, False) or file == MANIFEST
    return found


def copy_remote(store: ObjectStore, name: str, to: str) -> None:
    """Copy a folder to another name where nothing exists. Raises the errors of `open_remote`."""
    entries = _checked_entries(store, name)
    copies = {file: {**entry, OBJECT: _object_name(file, entry["sha256"])} for file, entry in entries.items()}
    for file, entry in entries.items():
        store.copy(_key(name, _object(file, entry)), _key(to, copies[file][OBJECT]))
    _send_manifest(store, to, copies, None)


def remove_remote(store: ObjectStore, name: str) -> int:
    """Remove a folder, atomically for readers. Returns its size in bytes; 0 if there was none."""
    there = store.list(name)
    manifest = _key(name, MANIFEST)
    store.delete([manifest] if any(stored.key == manifest for stored in there) else [])
    store.delete(stored.key for stored in there if stored.key != manifest)
    return sum(stored.size for stored in there)


def remote_bytes(store: ObjectStore, name: str) -> int:
    """Return the total size of the objects of a folder, in bytes."""
    return sum(stored.size for stored in store.list(name))


def _send_file(
    store: ObjectStore,
    name: str,
    file: str,
    path: Path,
    older: Mapping[str, Any] | None,
    replaced: str,
    there: Mapping[str, int],
) -> dict[str, Any]:
    """Upload a file unless its object exists. Returns its entry.

    Args:
        store: Target store.
        name: Name of the folder.
        file: Name of the file in the folder.
        path: The file.
        older: Entry of the file in the folder that is replaced. A file of the same content keeps its object.
        replaced: Hash of the manifest that is replaced, or "".
        there: Sizes of the objects of the folder, by key.
    """
    with _disk(path), path.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    entry: dict[str, Any] = {"sha256": sha256, "bytes": path.stat().st_size}
    if older is not None and older["sha256"] == sha256:
        entry[OBJECT] = _object(file, older)
    else:
        entry[OBJECT] = _object_name(file, sha256, replaced)
    key = _key(name, _object(file, entry))
    if there.get(key) == entry["bytes"]:
        found = store.find(key)
        if found is not None and (found.size, found.sha256) == (entry["bytes"], sha256):
            return entry
    store.put_file(key, path, sha256)
    return entry


def _object_name(file: str, sha256: str, replaced: str = "") -> str:
    """Return the object name of a file. `replaced` is the hash of the manifest that the folder replaces, or empty."""
    folder, base = posixpath.split(file)
    named = hashlib.sha256((replaced + sha256).encode()).hexdigest() if replaced else sha256
    return posixpath.join(folder, f"{named[:16]}-{base}")


def _unused(name: str, entries: Entries, kept: Entries, there: Mapping[str, int]) -> list[str]:
    """Return the keys of unused objects, which a replaced folder or interrupted uploads of the same files have left."""
    used = {_key(name, _object(file, entry)) for file, entry in entries.items()}
    older = {_key(name, _object(file, entry)) for file, entry in kept.items()}
    ours = {_key(name, file) for file in entries}
    return sorted(key for key in there if key not in used and (key in older or _HASH.sub("", key) in ours))


def _send_manifest(store: ObjectStore, name: str, entries: Entries, older: Stored | None) -> None:
    """Upload a manifest. Raises PreconditionFailed if the manifest in the store is no longer the version `older`."""
    key, manifest = _key(name, MANIFEST), json.dumps(entries, indent=1).encode()
    try:
        store.put(key, manifest, "create" if older is None else older.only_this)
    except PreconditionFailed:
        if store.get(key) != manifest:  # otherwise we put it, and the response was lost
            raise


def _in_order(entries: dict[str, dict[str, Any]], own: Path | None) -> dict[str, dict[str, Any]]:
    """Return the entries in the order of the manifest `own` on disk, if it lists the same files."""
    order = [] if own is None else list(json.loads(own.read_bytes()))
    return {file: entries[file] for file in order} if set(order) == entries.keys() else entries


def _written(entries: Entries) -> Written:
    return Written(sum(entry["bytes"] for entry in entries.values()), _digest(entries))


def _digest(entries: Entries) -> str:
    """Return the digest of the folder on disk, whose manifest does not name objects."""
    manifest = json.dumps({file: _local(entry) for file, entry in entries.items()}, indent=1)
    return hashlib.sha256(manifest.encode()).hexdigest()


def _entries(store: ObjectStore, name: str) -> Entries:
    manifest = store.get(_key(name, MANIFEST))
    if manifest is None:
        raise DamagedFiles(f"{store.url}/{name} is missing; use another checkpoint")
    return _parsed(store, name, manifest)


def _checked_entries(store: ObjectStore, name: str) -> Entries:
    """Return the entries of a manifest. Raises `DamagedFiles` unless all files exist with full length."""
    entries = _entries(store, name)
    there = {stored.key: stored.size for stored in store.list(name)}
    for file, entry in entries.items():
        if there.get(_key(name, _object(file, entry))) != entry["bytes"]:
            raise _damaged(store, name, f"{file} is missing or has another length than the manifest says")
    return entries


def _parsed(store: ObjectStore, name: str, manifest: bytes) -> Entries:
    """Return the entries of a manifest by file. Raises `DamagedFiles` for paths that leave the folder."""
    try:
        entries = json.loads(manifest)
        for file, entry in entries.items():
            places = (file, _object(file, entry))
            if any(place != posixpath.normpath(place) or place.startswith(("/", "..")) for place in places):
                raise ValueError
            if not isinstance(entry["sha256"], str) or not isinstance(entry["bytes"], int):
                raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(store, name, "its manifest is incomplete") from error
    return entries


def _object(file: str, entry: Mapping[str, Any]) -> str:
    return entry.get(OBJECT, file)


def _local(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != OBJECT}


def _key(name: str, file: str) -> str:
    return f"{name}/{file}"


def _damaged(store: ObjectStore, name: str, why: str) -> DamagedFiles:
    return DamagedFiles(f"{store.url}/{name} is damaged: {why}; use another checkpoint")


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Context that converts errors of the disk, except FileNotFoundError of a missing object."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(f"{path} cannot be read or written: {error.strerror or error}; free space") from error
