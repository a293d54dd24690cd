"""Trash: removed folders are kept for a while in `.trash`, below checkpoints_base, so that users can restore them.

Each folder has its own entry, `.trash/{time}-{bytes}-{random}/MODEL/KIND/NAME`. This path alone has the time of
removal, the size and the original location. Folders of a bucket go to the trash of that bucket.
"""

import calendar
import errno
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import uuid4

from skyrl.errors import StorageError
from skyrl.tinker.config import EngineConfig
from skyrl.utils.files.atomic_folders import folder_bytes, remove_folder
from skyrl.utils.files.object_store import is_url
from skyrl.utils.files.stored_folders import (
    copy_stored,
    inspect_stored,
    keys_below,
    remove_below,
    remove_stored,
    stored_bytes,
)

log = logging.getLogger(__name__)

NAME = ".trash"
_TIME = "%Y%m%dT%H%M%SZ"
_ENTRY = re.compile(r"(\d{8}T\d{6}Z)-(\d+)-[0-9a-f]{8}")


@dataclass(frozen=True, order=True)
class Entry:
    """A folder in the trash. The oldest entry sorts first."""

    since: float
    """Time of removal, in unix seconds."""
    place: str
    """Path or URL of the entry."""
    size_bytes: int
    what: str
    """MODEL/KIND/NAME of the folder."""

    @property
    def name(self) -> str:
        return f"{NAME}/{self.place.rpartition('/')[2]}"

    def remove(self) -> None:
        """Delete the entry permanently. Raises `StorageError`."""
        remove_below(self.place) if is_url(self.place) else remove_folder(self.place)


def discard(config: EngineConfig, folder: str, to_trash: bool) -> None:
    """Remove a folder, or move it to the trash. Failures are logged."""
    try:
        if is_url(path := config.path_of(folder)):
            _discard_remote(config, folder, path, to_trash)
        elif to_trash:
            _throw_away(config, folder)
        else:
            remove_folder(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # moving to the trash needs disk space, too
            log.warning("%s is removed at once, as %s has no room for it: %s", folder, NAME, error)
            remove_folder(config.checkpoints_folder / folder)
        else:
            log.warning("%s cannot be moved to %s and is kept in place: %s", folder, NAME, error)
    except StorageError as error:
        log.warning("%s is kept in place: %s", folder, error)


def _throw_away(config: EngineConfig, folder: str) -> None:
    source, base = config.checkpoints_folder / folder, config.checkpoints_folder
    if not source.is_dir():
        return
    entry = _new_entry(folder_bytes(source))
    target = base / NAME / entry / folder
    try:
        target.parent.mkdir(parents=True)
        os.rename(source, target)
    except OSError:
        remove_folder(base / NAME / entry)  # an entry counts as used space by its name
        raise


def _discard_remote(config: EngineConfig, folder: str, url: str, to_trash: bool) -> None:
    """Remove a folder from the bucket, after a copy to the trash if `to_trash`.

    If a kill leaves the folder in both places, the next round removes the original.
    """
    if to_trash and inspect_stored(url) is not None:
        copy_stored(url, f"{config.checkpoints_bucket}/{NAME}/{_new_entry(stored_bytes(url))}/{folder}")
    remove_stored(url)


def _new_entry(size_bytes: int) -> str:
    return f"{time.strftime(_TIME, time.gmtime())}-{size_bytes}-{uuid4().hex[:8]}"


def entries(config: EngineConfig) -> list[Entry]:
    """List the entries of the trash, oldest first. Other names are ignored. Raises `StorageError` if a bucket fails."""
    return sorted([*_on_disk(config), *_in_bucket(config)])


def _on_disk(config: EngineConfig) -> Iterator[Entry]:
    trash = config.checkpoints_folder / NAME
    try:
        names = os.listdir(trash)
    except FileNotFoundError:
        return
    for name in names:
        what = ", ".join(str(path.relative_to(trash / name)) for path in (trash / name).glob("*/*/*"))
        yield from _entry(str(trash / name), what)


def _in_bucket(config: EngineConfig) -> Iterator[Entry]:
    if config.checkpoints_bucket is None:
        return
    trash = f"{config.checkpoints_bucket}/{NAME}"
    found: dict[str, set[str]] = {}
    for key in keys_below(trash):
        name, *folder = key.split("/")[:4]
        found.setdefault(name, set()).add("/".join(folder))
    for name, folders in found.items():
        yield from _entry(f"{trash}/{name}", ", ".join(sorted(folders)))


def _entry(place: str, what: str) -> Iterator[Entry]:
    if match := _ENTRY.fullmatch(place.rpartition("/")[2]):
        since = calendar.timegm(time.strptime(match[1], _TIME))
        yield Entry(float(since), place, int(match[2]), what)
