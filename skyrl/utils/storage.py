"""Folders that are either wholly there or not there at all.

`write_folder` writes every file under a temporary name, adds a manifest with their hashes, flushes all to disk and
renames the folder into place; `read_folder` refuses a folder whose manifest or hashes do not match. Local paths only:
bucket URLs are refused by name.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from skyrl.errors import RequestError, StorageError

MANIFEST = "manifest.json"


def local_path(path: str | Path) -> Path:
    """The path as a local one. Raises `RequestError` for URLs such as s3://."""
    if "://" in str(path):
        scheme = str(path).split("://", 1)[0]
        raise RequestError(f"path={path}: {scheme}:// is not served yet; use a folder on a local or mounted disk")
    return Path(path)


class Written(NamedTuple):
    """A folder that is on disk."""

    size_bytes: int
    """Of its files, without the manifest."""
    digest: str
    """sha256 (hex) of its manifest, which holds the hashes of all files."""


def write_folder(path: str | Path, files: Mapping[str, bytes]) -> Written:
    """Put a folder with these files at `path`, replacing what is there.

    Raises:
        StorageError: The disk refuses a write. What was at `path` is unchanged.
    """
    target = local_path(path)
    temporary = target.with_name(f".{target.name}.{uuid4().hex}.tmp")
    entries = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
    manifest = json.dumps(entries, indent=1).encode()
    try:
        temporary.mkdir(parents=True)
        for name, data in files.items():
            _write_file(temporary / name, data)
        _write_file(temporary / MANIFEST, manifest)
        _flush_folder(temporary)
        _put_in_place(temporary, target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(
            f"cannot write {target}: {error.strerror or error}; free space or check permissions"
        ) from error
    return Written(sum(len(data) for data in files.values()), hashlib.sha256(manifest).hexdigest())


def read_folder(path: str | Path) -> dict[str, bytes]:
    """All files that the manifest of `path` lists, checked against their hashes.

    Raises:
        StorageError: The folder or one of its files is missing or damaged.
    """
    folder = local_path(path)
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        hashes = {name: entry["sha256"] for name, entry in manifest.items()}
        files = {name: (folder / name).read_bytes() for name in hashes}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{folder} is missing or incomplete ({error}); save the checkpoint again") from error
    for name, data in files.items():
        if hashlib.sha256(data).hexdigest() != hashes[name]:
            raise StorageError(
                f"{folder / name} is damaged: its hash differs from the manifest; use another checkpoint"
            )
    return files


def _write_file(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename, moving an older folder of that name out of the way first (a folder cannot be renamed over a full one)."""
    if target.exists():
        old = target.with_name(f".{target.name}.{uuid4().hex}.old")
        os.rename(target, old)
        try:
            os.rename(temporary, target)
        except OSError:
            os.rename(old, target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(temporary, target)
    _flush_folder(target.parent)


def _flush_folder(path: Path) -> None:
    """Put the names in a folder on disk."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
