"""Uploads: files that clients send one by one, to be imported as a checkpoint.

They are stored in `.uploads/{tenant}/{expires}-{id}/{file}`, below checkpoints_base. This path alone has the tenant and
the expiry time, so that a restarted server counts and removes uploads like its predecessor. A file gets its final name
only when it is complete.

Space is reserved before data is read, and divided between tenants by `skyrl.utils.quota`.
"""

import asyncio
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple
from uuid import uuid4

from skyrl.errors import RequestError, StorageError, UnknownName
from skyrl.utils.files.atomic_folders import remove_folder
from skyrl.utils.quota import Busy, Quota

NAME = ".uploads"
LIFETIME_S = 3600
"""Seconds from the start of an upload to its expiry."""
LARGEST_AT_A_TIME = 8
"""Total size limit of all tenants' uploads, as a multiple of the maximum size of one file."""
MOST_OPEN = 32
"""Maximum number of uploads per tenant that have files."""
MOST_FINISHING = 4
"""Maximum number of uploads per sharer that are being finished: one in progress, the others queued."""
STEP_BYTES = 16 * 2**20
"""Bytes reserved at a time for a body without Content-Length."""
WRITTEN_BYTES = 2**20
"""Bytes written at a time."""
_FOLDER = re.compile(r"(\d+)-([0-9a-f]{32})")

MakeRoom = Callable[[int], Awaitable[None]]
"""Makes room on the disk for a number of bytes. Raises `RequestError`."""


@dataclass(frozen=True)
class Upload:
    """An upload. The fields are the parts of its folder's path."""

    tenant: str
    expires: int
    """Unix time."""
    id: str

    @classmethod
    def begin(cls, tenant: str) -> "Upload":
        """Return a new upload, which expires after `LIFETIME_S`."""
        return cls(tenant, int(time.time()) + LIFETIME_S, uuid4().hex)

    @property
    def folder(self) -> str:
        """Folder of the upload, below checkpoints_base."""
        return f"{NAME}/{self.tenant}/{self.expires}-{self.id}"


class Stored(NamedTuple):
    """Size of an upload on disk."""

    upload: Upload
    size_bytes: int
    """Bytes of all files."""
    partial_bytes: int
    """Bytes of incomplete files."""


def stored_uploads(base: Path) -> list[Stored]:
    """List uploads that have files. Other names are ignored."""
    found = []
    for tenant in _names(base / NAME):
        for name in _names(base / NAME / tenant):
            if match := _FOLDER.fullmatch(name):
                upload = Upload(tenant, int(match[1]), match[2])
                sizes = list(_sizes(base / upload.folder))
                partial = sum(size for file, size in sizes if file.startswith("."))
                found.append(Stored(upload, sum(size for _, size in sizes), partial))
    return found


def too_large(name: str, size: str, limit: int, way_out: str) -> RequestError:
    """Return the error for a file of an upload that has more than `limit` bytes."""
    return RequestError(f"{name}: the file has {size}, and {limit} bytes are the most for it here; {way_out}")


class Uploads:
    """Files of uploads, below the checkpoint folder, which this process has locked.

    Args:
        base: Checkpoint folder.
    """

    def __init__(self, base: Path):
        self._base = base
        self._arriving: Counter[str] = Counter()
        """Bytes by tenant that are reserved for incomplete files."""
        self._turn = asyncio.Lock()
        """Makes two steps atomic: counting and reserving bytes, and renaming a file and releasing its reservation."""
        self._importing = asyncio.Lock()
        """Lock of an import, so that only one adapter is in memory at a time."""
        self._lines: dict[str, asyncio.Lock] = {}
        """Lock per sharer, so that only one finish of each sharer waits for `_importing`."""
        self._finishing: Counter[str] = Counter()
        """Number of running and waiting finishes per sharer."""

    def tidy(self) -> None:
        """Remove leftovers of interrupted writes and removals. Call before any file is received."""
        for path in (*self._base.glob(f"{NAME}/*/.*"), *self._base.glob(f"{NAME}/*/*/.*")):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def path(self, upload: Upload, name: str) -> Path:
        """Return the path of a file."""
        return self._base / upload.folder / name

    async def receive(
        self,
        upload: Upload,
        name: str,
        pieces: AsyncIterator[bytes],
        *,
        announced: int,
        limit: int,
        largest: int,
        way_out: str,
        make_room: MakeRoom,
    ) -> None:
        """Store a file. An existing file of this name is replaced once the new one is complete.

        Args:
            upload: Upload of the file.
            name: Name of the file.
            pieces: Content of the file.
            announced: Length of the file in bytes; 0 if unknown.
            limit: Maximum length of this file in bytes.
            largest: Maximum length of any file of an upload.
            way_out: Advice for the sender of a file that is too large.
            make_room: Makes room on the disk before data is read.

        Raises:
            RequestError: The file is too large, or exceeds the tenant's quota.
            UnknownName: The upload has expired or is finished.
            StorageError: Writing to the disk failed.
        """
        reserved = 0

        async def reserve(size: int) -> None:
            nonlocal reserved
            if size > limit:
                raise too_large(name, f"{size} bytes" if announced else f"{size} bytes or more", limit, way_out)
            if size > reserved:
                await self._reserve(upload, size - reserved, LARGEST_AT_A_TIME * largest, make_room)
                reserved = size

        try:
            await reserve(min(announced or STEP_BYTES, limit) if announced <= limit else announced)
            async with self._temporary(upload, name) as file:
                size, written = 0, bytearray()
                async for piece in pieces:
                    size += len(piece)
                    if size > reserved:
                        await reserve(min(size + STEP_BYTES, limit) if size <= limit else size)
                    written += piece
                    if len(written) >= WRITTEN_BYTES:
                        await asyncio.to_thread(_write, file, bytes(written))
                        written.clear()
                await asyncio.to_thread(_write, file, bytes(written), True)
                async with self._turn:
                    await asyncio.to_thread(os.replace, file.name, self.path(upload, name))
                    self._release(upload, reserved)
                    reserved = 0
        except FileNotFoundError as error:
            raise UnknownName("the upload has expired or was finished meanwhile; start another") from error
        except OSError as error:
            raise StorageError(f"{self.path(upload, name)} cannot be written: {error.strerror or error}") from error
        finally:
            self._release(upload, reserved)

    @asynccontextmanager
    async def turn_to_import(self, sharer: str) -> AsyncIterator[None]:
        """Context in which an adapter may be imported.

        One import runs at a time. Each sharer has at most one import in the queue. Its other imports wait outside.

        Args:
            sharer: Sharer that finishes an upload; see `Caller.sharer`.

        Raises:
            Busy: `MOST_FINISHING` finishes of the sharer are running or waiting.
        """
        if self._finishing[sharer] >= MOST_FINISHING:
            raise Busy(
                f"{MOST_FINISHING} uploads of this sender are being finished, which is the limit; send this request "
                "again in a second"
            )
        self._finishing[sharer] += 1
        try:
            async with self._lines.setdefault(sharer, asyncio.Lock()), self._importing:
                yield
        finally:
            self._finishing[sharer] -= 1
            if not self._finishing[sharer]:
                del self._finishing[sharer], self._lines[sharer]

    async def remove(self, upload: Upload) -> None:
        """Remove the files of an upload."""
        await asyncio.to_thread(remove_folder, self._base / upload.folder)
        with suppress(OSError):  # the tenant has other uploads
            (self._base / upload.folder).parent.rmdir()

    async def _reserve(self, upload: Upload, amount: int, limit: int, make_room: MakeRoom) -> None:
        async with self._turn:
            stored = await asyncio.to_thread(stored_uploads, self._base)
            mine = {one.upload.id for one in stored if one.upload.tenant == upload.tenant}
            if upload.id not in mine and len(mine) >= MOST_OPEN:
                raise RequestError(
                    f"{len(mine)} uploads of this tenant are unfinished, and {MOST_OPEN} may be; finish them "
                    "(external_weights_upload_finish), or wait until they have expired"
                )
            quota = Quota("uploads of {} bytes")
            for one in stored:
                quota.add(one.upload.tenant, one.size_bytes - one.partial_bytes)  # rest: in `_arriving`
            for tenant, size in self._arriving.items():
                quota.add(tenant, size)
            if not quota.has_room(upload.tenant, amount, limit):
                raise RequestError(
                    f"there is no room for {amount} more bytes of this tenant's unfinished uploads now; finish them "
                    "(external_weights_upload_finish), or wait until they have expired"
                )
            written = sum(one.partial_bytes for one in stored)
            await make_room(amount + self._arriving.total() - written)
            self._arriving[upload.tenant] += amount

    def _release(self, upload: Upload, amount: int) -> None:
        self._arriving[upload.tenant] -= amount
        if not self._arriving[upload.tenant]:
            del self._arriving[upload.tenant]

    @asynccontextmanager
    async def _temporary(self, upload: Upload, name: str) -> AsyncIterator[BinaryIO]:
        """Create a temporary file next to `name`. It is removed at the end of the block unless it was renamed."""
        path = self.path(upload, f".{name}.{uuid4().hex}")
        file = await asyncio.to_thread(_open_new, path)
        try:
            yield file
        finally:
            file.close()
            path.unlink(missing_ok=True)


def _names(folder: Path) -> Iterator[str]:
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from os.listdir(folder)


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield names and bytes of the files in a folder. Files that disappear meanwhile are skipped."""
    for name in _names(folder):
        with suppress(FileNotFoundError):
            yield name, os.lstat(folder / name).st_size


def _open_new(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "xb")


def _write(file: BinaryIO, data: bytes, is_last: bool = False) -> None:
    file.write(data)
    if is_last:
        file.flush()
        os.fsync(file.fileno())
