"""Folders and files that only this user can open, in places where other users may have prepared something else."""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from skyrl.errors import RequestError

WAY_OUT = "remove it, or name another folder"
PRIVATE = 0o077
"""Umask of files that only this user can access."""
UMASK = "SKYRL_UMASK"
"""Environment variable with the umask of commands, for outputs that others may read."""
OPEN_TO_OTHERS = stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH


def umask_of_commands() -> int:
    """Return the umask of commands: `PRIVATE`, or that in `SKYRL_UMASK`. Raises ValueError if it is none."""
    given = os.environ.get(UMASK, "")
    if not given:
        return PRIVATE
    if not re.fullmatch("[0-7]{1,4}", given):
        raise ValueError(f"{UMASK}={given} is no umask; give octal digits, such as 022 or 077, or leave it out")
    return int(given, 8)


@contextmanager
def private_files() -> Iterator[None]:
    """Context with the umask `PRIVATE`, for files that a library creates."""
    before = os.umask(PRIVATE)
    try:
        yield
    finally:
        os.umask(before)


def is_open_to_others(status: os.stat_result) -> bool:
    """Return True if other users can read or change a file with secrets.

    Files of root may be readable by their group, as mounted secrets of containers are: root chose the group.
    """
    return bool(status.st_mode & (OPEN_TO_OTHERS if status.st_uid == 0 else OPEN_TO_OTHERS | stat.S_IRGRP))


def private_folder(path: Path) -> Path:
    """Create a folder with mode 0700, or check the one that is there. Returns the path.

    A folder of this user that others can read loses this permission.

    Raises:
        RequestError: The path is a link or a file, belongs to another user, or other users could write to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise RequestError(f"{path}: is no folder of this user ({error.strerror}); {WAY_OUT}") from error
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid():
            raise RequestError(f"{path}: belongs to another user (uid {status.st_uid}); {WAY_OUT}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(status.st_mode)
            raise RequestError(f"{path}: other users can write to it (mode {mode:04o}); {WAY_OUT}")
        os.fchmod(handle, 0o700)
    finally:
        os.close(handle)
    return path
