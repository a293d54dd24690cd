"""Stores that servers of tests save to: a folder of the disk, or a bucket of an S3 server.

A module with `STORES = BOTH` runs its tests that use the fixture `store` on each. The cases of the disk have no id.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl.tinker.config import EngineConfig
from skyrl.utils.files.object_store import ObjectStore

BOTH = [pytest.param("disk", id=pytest.HIDDEN_PARAM), "s3"]  # pyright: ignore[reportArgumentType]
Store = Callable[[Path], dict[str, Any]]
"""Options by which a server with this folder saves to the store, snapshots and unnamed versions too."""


def disk(folder: Path) -> dict[str, Any]:
    return {}


def in_bucket(url: str) -> Store:
    def options(folder: Path) -> dict[str, Any]:
        prefix = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        return {"checkpoints_base": f"{url}/{prefix}", "snapshots_in_bucket": True}

    return options


def stored_files(config: EngineConfig) -> dict[str, int]:
    """Bytes of a server's files, by MODEL/KIND/NAME/FILE, and `.trash/ENTRY/` before it for files in the trash."""
    if config.checkpoints_bucket is None:
        base = Path(config.checkpoints_base)
        return {str(path.relative_to(base)): path.stat().st_size for path in base.rglob("*") if path.is_file()}
    listed = ObjectStore(config.checkpoints_bucket).list()
    return {re.sub(r"/[0-9a-f]{16}-([^/]*)$", r"/\1", stored.key): stored.size for stored in listed}


def stored_folders(config: EngineConfig, kind: str) -> list[str]:
    """Sorted NAMEs of all models' folders of one kind that have files. Folders in the trash are left out."""
    parts = (name.split("/") for name in stored_files(config))
    return sorted(name for _, name in {(part[0], part[2]) for part in parts if len(part) == 4 and part[1] == kind})


def in_trash(config: EngineConfig) -> list[str]:
    """KIND/NAME of each folder in the trash."""
    entries = (name.split("/") for name in stored_files(config) if name.startswith(".trash/"))
    return sorted({"/".join(entry[3:5]) for entry in entries if len(entry) == 6})
