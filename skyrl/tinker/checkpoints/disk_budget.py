"""The folder of checkpoints: held by one server, tidied when it starts, and kept within its limits.

What it holds is known from the rows of checkpoints, versions and snapshots, so that asking costs a query and not a walk
through the folder. What the disk has left is asked of the disk.
"""

import asyncio
import logging
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from sqlalchemy import func
from sqlmodel import Session, col, select

from skyrl.errors import RequestError, StorageError
from skyrl.tinker.checkpoints import trash
from skyrl.tinker.checkpoints.transfer.uploads import stored_uploads
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.database.database import Database
from skyrl.tinker.database.tables import CheckpointRow, ModelRow, VersionRow
from skyrl.utils.files.atomic_folders import tidy
from skyrl.utils.files.stored_folders import folders_below
from skyrl.utils.locks.lease import Lease

log = logging.getLogger(__name__)

LOCK = ".server.lock"
EPHEMERAL = "ephemeral"
KINDS = ("weights", "sampler_weights", "external_weights", EPHEMERAL, "snapshots")
"""Folders of a model. Others are not ours."""
DEPTH = 3
"""Parts of the name of what is saved: MODEL/KIND/NAME."""
_TOP = re.compile(r"[0-9a-f-]{36}-train-\d+|\.(trash|uploads|state-id|server\.lock|engine\.lock|running|crashes\.json)")
"""Names below the folder that are ours: whoever cannot enter those reaches nothing further down."""
MIB, GIB = 2**20, 2**30
_MODEL = re.compile(r"[0-9a-f-]{36}-train-\d+")
"""Name of a model's folder. Others are not ours, such as what a file system keeps in its root."""
WAY_OUT = "delete checkpoints (tinker checkpoint delete), finish sessions, or start the server with"


def hold_folder(base: Path, finish_writes: bool = True, stopping: threading.Event | None = None) -> Lease:
    """Take the folder for this process.

    Args:
        base: The folder. It is made if it is missing.
        finish_writes: Finish, or take back, what a killed server was writing, and take from others what an earlier
            one let them read.
        stopping: Set when there is no use any more in waiting for a server that is about to end.

    Raises:
        RequestError: It cannot be written, or another server uses it.
    """
    option = f"checkpoints_base={base}"
    try:
        lease = Lease(base / LOCK, option, "--checkpoints-base", stopping)
        try:
            tempfile.TemporaryFile(dir=base).close()  # the first save is not to be the one to find out that this fails
            if finish_writes:
                _make_private(base)
                for parent in (*folders_of_kinds(base), base / trash.NAME):
                    if parent.is_dir():
                        tidy(parent)
        except BaseException:
            lease.release()
            raise
    except OSError as error:
        raise RequestError(f"{option}: {error.strerror or error}; use a folder that can be written") from error
    return lease


def _make_private(base: Path) -> None:
    """The user's alone, but for the folder itself, which others may have a part in."""
    for path in base.iterdir():
        if _TOP.fullmatch(path.name):
            with suppress(OSError):  # it is somebody else's, or gone
                mode = stat.S_IMODE(path.stat().st_mode)
                if mode & (stat.S_IRWXG | stat.S_IRWXO):
                    path.chmod(mode & stat.S_IRWXU)


def folders_of_kinds(base: Path) -> Iterator[Path]:
    """The folders MODEL/KIND, which hold all that is saved."""
    for model in base.iterdir():
        if model.is_dir() and not model.name.startswith("."):
            yield from (kind for kind in model.iterdir() if kind.is_dir())


def saved_folders(base: Path, bucket: str | None = None) -> set[str]:
    """MODEL/KIND/NAME of all that is saved, as the database names it. Raises `StorageError` of the bucket."""
    kinds = (kind for kind in folders_of_kinds(base) if kind.name in KINDS)
    paths = (path for kind in kinds for path in kind.iterdir() if path.is_dir() and not path.name.startswith("."))
    remote = {} if bucket is None else folders_below(bucket, DEPTH)
    return {str(path.relative_to(base)) for path in paths} | {name for name, kept in remote.items() if kept.is_whole}


def remove_empty_folders(base: Path, kind: Path | None = None) -> None:
    """Remove the folders MODEL/KIND, and then MODEL, that hold nothing. A save that needs one makes it again.

    Args:
        base: Folder of checkpoints.
        kind: Look at this one and its MODEL only.
    """
    kinds = list(folders_of_kinds(base)) if kind is None else [kind]
    models = {path.parent for path in kinds} if kind is not None else set(base.iterdir())
    ours = {model for model in models if model.parent == base and _MODEL.fullmatch(model.name)}
    for path in (*(kind for kind in kinds if kind.parent in ours), *ours):
        with suppress(OSError):  # it is not empty, or gone
            path.rmdir()


class Disk:
    """Refuses what would not fit.

    Args:
        config: `checkpoints_base` and its limits.
        database: Knows what has been saved.
    """

    def __init__(self, config: EngineConfig, database: Database):
        self._config = config
        self._database = database
        self.collect: Callable[[], Awaitable[object]] | None = None
        """Removes what nobody needs any more, as soon as there is something that does so."""

    async def found(self) -> tuple[dict[str, int], int]:
        """(bytes of what is saved, by kind; bytes that the disk has left)."""
        free = shutil.disk_usage(self._config.checkpoints_folder).free
        return await self._database.read(stored_bytes), free

    async def make_room(self, model_id: str, sampler: bool) -> None:
        """See to it that a save of a model fits; what can go goes first, then the trash, the oldest of it first.

        Args:
            model_id: The model that is to be saved.
            sampler: Whether only its weights are saved, not its optimizer.

        Raises:
            RequestError: It does not fit. The message says what is taken, what may be, and a way out.
        """
        await self.make_room_for(
            await self._database.read(partial(_expected_bytes, model_id=model_id, sampler=sampler))
        )

    async def make_room_for(self, size: int) -> None:
        """See to it that so many bytes fit. Raises as `make_room`."""
        if await self._refusal(size) is None:
            return
        if self.collect is not None:
            await self.collect()
        left = await asyncio.to_thread(_trash_of, self._config)
        in_trash = sum(entry.size_bytes for entry in left)
        if (refusal := await self._refusal(size, without=in_trash)) is not None:
            raise RequestError(refusal)  # it would not fit without the trash either
        while (refusal := await self._refusal(size)) is not None:
            if not left:
                raise RequestError(refusal)
            log.info("removing %s from the trash to free space", left[0].place)
            await asyncio.to_thread(left.pop(0).remove)

    async def _refusal(self, size: int, without: int = 0) -> str | None:
        """Reason why so many bytes do not fit, also if others went. None if they fit."""
        config = self._config
        free = shutil.disk_usage(config.checkpoints_folder).free
        if free + without - size < config.min_free_disk_mib * MIB:
            return (
                f"the disk of checkpoints has {free / MIB:.0f} MiB left, of which min_free_disk_mib="
                f"{config.min_free_disk_mib} are to stay free, and this needs {size / MIB:.1f}; {WAY_OUT} a lower "
                "--min-free-disk-mib or on a larger disk"
            )
        if config.max_disk_gib == 0:
            return None
        used = sum((await self._database.read(stored_bytes)).values())
        used += sum(entry.size_bytes for entry in await asyncio.to_thread(_trash_of, config))
        used += sum(stored.size_bytes for stored in stored_uploads(config.checkpoints_folder))
        if used - without + size > config.max_disk_gib * GIB:
            return (
                f"checkpoints take {used / GIB:.3f} GiB of max_disk_gib={config.max_disk_gib:g}, and this needs "
                f"{size / GIB:.3f}; {WAY_OUT} a larger --max-disk-gib"
            )
        return None


def _trash_of(config: EngineConfig) -> list[trash.Entry]:
    """Entries of the trash. Raises `RequestError` if the bucket does not tell them."""
    try:
        return trash.entries(config)
    except StorageError as error:
        raise RequestError(f"it is not known what the trash takes: {error}") from error


def stored_bytes(session: Session) -> dict[str, int]:
    """Bytes of checkpoints, versions without a name and snapshots, as far as they are known."""
    columns = {
        "checkpoint": col(CheckpointRow.size_bytes),
        "version": col(VersionRow.size_bytes),
        "snapshot": col(ModelRow.snapshot_bytes),
    }
    return {kind: session.exec(select(func.sum(column))).one() or 0 for kind, column in columns.items()}


def _expected_bytes(session: Session, model_id: str, sampler: bool) -> int:
    """Bytes that saving a model will take: as many as the last time. 0 where there was none."""
    kind = "sampler_weights" if sampler else "weights"
    named = select(CheckpointRow.size_bytes).where(CheckpointRow.model_id == model_id, CheckpointRow.kind == kind)
    sizes = [session.exec(named.order_by(col(CheckpointRow.id).desc()).limit(1)).first()]
    if sampler:
        written = select(VersionRow.size_bytes).where(
            VersionRow.model_id == model_id, col(VersionRow.size_bytes).is_not(None)
        )
        sizes.append(session.exec(written.limit(1)).first())
    return max(size or 0 for size in sizes)
