"""Folders as a single tar file, uncompressed or in gzip format (by suffix), for moving checkpoints as files.

A tar is written piece by piece, and atomically. The contents of a tar that is read are untrusted: the tar may contain
only plain files with expected names, up to an expected total size, and nothing after its end. Decompression stops at
that size. Headers, which are parsed in memory, have a limit of their own.
"""

import gzip
import io
import tarfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from skyrl.errors import RequestError, StorageError
from skyrl.utils.failpoints import crash_point
from skyrl.utils.files.atomic_folders import replace_file

GZIP_SUFFIXES = (".tar.gz", ".tgz")
TAR_SUFFIXES = (".tar", *GZIP_SUFFIXES)
"""Suffixes of paths at which a checkpoint is a tar instead of a folder."""
BLOCKS = 64 * 1024
"""Maximum total size of the headers and padding in an archive, in bytes."""
LONGEST_HEADER = 16 * 1024
"""Maximum size of one header with its long names or attributes, in bytes. The time to search it grows quadratically."""
GZIP_MAGIC = b"\x1f\x8b"


class Limits(NamedTuple):
    """Expected contents of an archive."""

    names: Collection[str]
    """Names of required files."""
    max_bytes: int
    """Maximum total size of all files, in bytes."""
    patterns: Collection[str] = ()
    """Names or name patterns of optional files."""


def is_tar(path: str | Path) -> bool:
    """Return True if a checkpoint's path has the suffix of a tar."""
    return str(path).endswith(TAR_SUFFIXES)


def without_suffix(name: str) -> str:
    """Return a name without the suffix of a tar."""
    return next((name.removesuffix(suffix) for suffix in TAR_SUFFIXES if name.endswith(suffix)), name)


def pack_folder(folder: Path, archive: Path) -> None:
    """Write a tar of the files of a folder to `archive`. Raises `StorageError` if a write fails.

    Gzip format is written without compression, because compression would take minutes and hardly makes weights smaller.
    """

    def write(file: BinaryIO) -> None:
        with tarfile.open(fileobj=file, mode="w|") as tar:
            for path in sorted(folder.iterdir()):
                info = tarfile.TarInfo(path.name)
                info.size = path.stat().st_size
                with path.open("rb") as content:
                    tar.addfile(info, content)
                crash_point("archive: half written")

    def write_gzip(file: BinaryIO) -> None:
        with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=0, mtime=0) as packed:
            write(cast(BinaryIO, packed))

    replace_file(archive, write_gzip if str(archive).endswith(GZIP_SUFFIXES) else write)


def unpack_folder(archive: Path, folder: Path, limits: Limits) -> None:
    """Extract the files of a tar into a new folder.

    Raises:
        RequestError: The file is not a tar, plain or gzipped, or its contents are unexpected. Nothing outside `folder`
            was changed.
        StorageError: The file cannot be read, or a write fails.
    """
    folder.mkdir(parents=True)
    with _opened(archive, limits.max_bytes) as (tar, reader):
        for member in _members(archive, tar, reader, limits):
            tar.extract(member, folder, set_attrs=False, filter="data")
        while reader.read(BLOCKS):
            pass
        if reader.filled > tar.offset:
            raise _refused(archive, "something follows the end of the tar in it")


def read_member(archive: Path, name: str, max_bytes: int, limits: Limits) -> bytes:
    """Return the content of one file of a tar, of at most `max_bytes`. Later files are not read.

    Raises the errors of `unpack_folder`.
    """
    with _opened(archive, limits.max_bytes) as (tar, reader):
        for member in _members(archive, tar, reader, limits):
            if member.name == name:
                if member.size > max_bytes:
                    raise _refused(archive, f"{name} in it has {member.size} bytes, and {max_bytes} are the most")
                content = tar.extractfile(member)
                return b"" if content is None else content.read()
    raise _refused(archive, f"it lacks {[name]}")


def _members(archive: Path, tar: tarfile.TarFile, reader: "_Bounded", limits: Limits) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar in order. Each is checked before it is yielded.

    The folder itself, which `tar -C folder .` packs as the first member, is skipped. Names then start with `./`.
    """
    left, missing, seen = limits.max_bytes, set(limits.names), set[str]()
    while (member := tar.next()) is not None:
        if member.isdir() and member.name in ("", "."):
            continue
        name = member.name = member.name.removeprefix("./")
        expected = name in limits.names or any(fnmatchcase(name, pattern) for pattern in limits.patterns)
        if name in seen or not expected or "/" in name:
            left_to_come = sorted(missing) or [one for one in limits.patterns if one not in seen]
            raise _refused(archive, f"it holds {name!r}, where {left_to_come} are left to come")
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None or member.size < 0:
            raise _refused(archive, f"{name} in it is no plain file")
        seen.add(name)
        missing.discard(name)
        left -= member.size
        if left < 0:
            raise _refused(archive, f"its files have more than the {limits.max_bytes} bytes that are the most here")
        reader.is_at_header = False
        yield member
        reader.seek(member.offset_data + member.size)
        reader.is_at_header = True
    reader.is_at_header = False
    if missing:
        raise _refused(archive, f"it lacks {sorted(missing)}")


@contextmanager
def _opened(archive: Path, max_bytes: int) -> Iterator[tuple[tarfile.TarFile, "_Bounded"]]:
    """Context with (tar for sequential reading, reader of its bytes). Converts read errors."""
    try:
        with archive.open("rb") as file:
            packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            size, most = file.seek(0, io.SEEK_END), max_bytes + BLOCKS
            file.seek(0)
            if size > most * 1.01:
                raise _refused(archive, f"it has {size} bytes, and {max_bytes} are the most here")
            stream = gzip.GzipFile(fileobj=file, mode="rb") if packed else file
            reader = _Bounded(cast(BinaryIO, stream), most)
            with tarfile.open(fileobj=cast(BinaryIO, reader), mode="r:") as tar:
                yield tar, reader
    except _TooLarge as error:
        raise _refused(archive, f"it unpacks to more than the {max_bytes} bytes that are the most here") from error
    except _HeadersTooLarge as error:
        raise _refused(archive, f"its headers have more than the {BLOCKS} bytes that are the most here") from error
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, ValueError) as error:  # ValueError of a header
        raise _refused(archive, f"it is no whole tar, plain or gzipped ({error})") from error
    except OSError as error:
        raise StorageError(f"{archive} cannot be read: {error.strerror or error}; use another checkpoint") from error


class _TooLarge(Exception):
    """The limit of bytes was exceeded."""


class _HeadersTooLarge(Exception):
    """A limit of bytes in headers was exceeded."""


class _Bounded(io.RawIOBase):
    """Reads a stream forward up to a number of bytes, and records the position of the last nonzero byte."""

    def __init__(self, stream: BinaryIO, most: int):
        self._stream, self._left, self._headers_left, self._position = stream, most, BLOCKS, 0
        self.filled = 0
        """Offset after the last nonzero byte."""
        self.is_at_header = True
        """True while headers are read. All headers together may have `BLOCKS` bytes."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Skip bytes up to `offset`, or to the end of the stream."""
        if offset < self._position:
            raise tarfile.ReadError("a header in it points back")
        while self._position < offset and self.read(min(BLOCKS, offset - self._position)):
            pass
        return self._position

    def read(self, size: int = -1) -> Any:
        size = BLOCKS if size < 0 else size
        if self.is_at_header:
            self._headers_left -= size
            if size > LONGEST_HEADER or self._headers_left < 0:
                raise _HeadersTooLarge
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise _TooLarge
        if kept := len(data.rstrip(b"\0")):
            self.filled = self._position + kept
        self._position += len(data)
        return data


def _refused(archive: Path, why: str) -> RequestError:
    return RequestError(
        f"path={archive}: {why}; use a file that save_checkpoint or save_sampler_checkpoint has made for this model"
    )
