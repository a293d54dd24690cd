"""Folders as one uncompressed tar, for who moves checkpoints as files.

A tar is written piece by piece and is at its name wholly or not at all. What is in one that is read is believed in
nothing: its names have to be the expected ones, of plain files, and all of them together no larger than is expected.
"""

import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from skyrl.errors import RequestError, StorageError
from skyrl.utils.failpoints import crash_point
from skyrl.utils.files.atomic_folders import replace_file

BLOCKS = 64 * 1024
"""Bytes that headers and padding of a few files take at most."""


def pack_folder(folder: Path, archive: Path) -> None:
    """Put a tar of the files of a folder at `archive`. Raises `StorageError` if the disk refuses it."""

    def write(file: BinaryIO) -> None:
        with tarfile.open(fileobj=file, mode="w|") as tar:
            for path in sorted(folder.iterdir()):
                info = tarfile.TarInfo(path.name)
                info.size = path.stat().st_size
                with path.open("rb") as content:
                    tar.addfile(info, content)
                crash_point("archive: half written")

    replace_file(archive, write)


def unpack_folder(archive: Path, folder: Path, names: Collection[str], max_bytes: int) -> None:
    """Make a folder of the files in a tar.

    Args:
        archive: The tar.
        folder: Where there is nothing yet.
        names: Those that it has to hold, and no others.
        max_bytes: Of all files together.

    Raises:
        RequestError: It is no uncompressed tar, or holds anything else. Nothing outside `folder` was touched.
        StorageError: It cannot be read, or the disk refuses a file.
    """
    folder.mkdir(parents=True)
    left, missing = max_bytes, set(names)
    try:
        if archive.stat().st_size > max_bytes + BLOCKS:
            raise _refused(archive, f"it has {archive.stat().st_size} bytes, and {max_bytes} are the most here")
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                if member.name not in missing:
                    raise _refused(archive, f"it holds {member.name!r}, where {sorted(missing)} are left to come")
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
                    raise _refused(archive, f"{member.name} in it is no plain file")
                missing.discard(member.name)
                left -= member.size
                if left < 0:
                    raise _refused(archive, f"its files have more than the {max_bytes} bytes that are the most here")
                tar.extract(member, folder, set_attrs=False, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise _refused(archive, f"it is no whole uncompressed tar ({error})") from error
    except OSError as error:
        raise StorageError(f"{archive} cannot be read: {error.strerror or error}; use another checkpoint") from error
    if missing:
        raise _refused(archive, f"it lacks {sorted(missing)}")


def _refused(archive: Path, why: str) -> RequestError:
    return RequestError(f"path={archive}: {why}; use a file that save_checkpoint has made for this model")
