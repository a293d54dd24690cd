"""Trash: files that the collector has taken wait there, in case somebody misses them: `.trash`, below checkpoints_base.

Each folder has an entry of its own, `.trash/{time}-{bytes}-{random}/MODEL/KIND/NAME`, so that what is there, since when
and how large it is can be told from names alone, and whoever moves it back sees where it was.
"""

import calendar
import errno
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from skyrl.utils.files.atomic_folders import folder_bytes, remove_folder

log = logging.getLogger(__name__)

NAME = ".trash"
_TIME = "%Y%m%dT%H%M%SZ"
_ENTRY = re.compile(r"(\d{8}T\d{6}Z)-(\d+)-[0-9a-f]{8}")


@dataclass(frozen=True, order=True)
class Entry:
    """A folder in the trash. The one that has been there longest is the least."""

    since: float
    """Time at which it came, in unix seconds."""
    path: Path
    size_bytes: int


def discard(base: Path, folder: str, to_trash: bool) -> None:
    """Remove a folder below `base`, or put it into the trash."""
    if not to_trash:
        remove_folder(base / folder)
        return
    try:
        _throw_away(base, folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # what is to make room needs some in the trash
            log.warning("%s is removed at once, as %s has no room for it: %s", folder, NAME, error)
            remove_folder(base / folder)
        else:
            log.warning("%s cannot be moved to %s and is kept in place: %s", folder, NAME, error)


def _throw_away(base: Path, folder: str) -> None:
    source = base / folder
    if not source.is_dir():
        return
    entry = f"{time.strftime(_TIME, time.gmtime())}-{folder_bytes(source)}-{uuid4().hex[:8]}"
    target = base / NAME / entry / folder
    try:
        target.parent.mkdir(parents=True)
        os.rename(source, target)
    except OSError:
        remove_folder(base / NAME / entry)  # its name says that it takes room
        raise


def entries(base: Path) -> list[Entry]:
    """Entries of the trash, oldest first. What is named otherwise is not ours."""
    return sorted(_entries(base))


def what(entry: Entry) -> str:
    """MODEL/KIND/NAME of what an entry holds."""
    return ", ".join(str(path.relative_to(entry.path)) for path in entry.path.glob("*/*/*"))


def _entries(base: Path) -> Iterator[Entry]:
    try:
        names = os.listdir(base / NAME)
    except FileNotFoundError:
        return
    for name in names:
        if match := _ENTRY.fullmatch(name):
            since = calendar.timegm(time.strptime(match[1], _TIME))
            yield Entry(float(since), base / NAME / name, int(match[2]))
