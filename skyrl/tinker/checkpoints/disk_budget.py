"""The checkpoint folder: its lock, its cleanup at startup, and its size limits.

Used bytes are computed from the rows of checkpoints, versions and snapshots: one query instead of a directory walk.
Free bytes are read from the file system.
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
"""Names of a model's subfolders. All others are ignored."""
DEPTH = 3
"""Number of parts of the name of a saved folder: MODEL/KIND/NAME."""
_TOP = re.compile(r"[0-9a-f-]{36}-train-\d+|\.(trash|uploads|state-id|server\.lock|engine\.lock|running|crashes\.json)")
"""Names of the server's own entries in the checkpoint folder. Their permissions protect everything below them."""
MIB, GIB = 2**20, 2**30
_MODEL = re.compile(r"[0-9a-f-]{36}-train-\d+")
"""Name of a model's folder. All others are ignored, such as `lost+found` in the root of a file system."""
WAY_OUT = "delete checkpoints (tinker checkpoint delete), finish sessions, or start the server with"


def hold_folder(base: Path, finish_writes: bool = True, stopping: threading.Event | None = None) -> Lease:
    """Lock the checkpoint folder for this process.

    Args:
        base: Checkpoint folder. Created if missing.
        finish_writes: Complete or roll back interrupted writes of a killed server, and remove the access of other
            users that an earlier version granted.
        stopping: Event that ends the wait for another server that is about to exit.

    Raises:
        RequestError: The folder is not writable, or another server uses it.
    """
    option = f"checkpoints_base={base}"
    try:
        lease = Lease(base / LOCK, option, "--checkpoints-base", stopping)
        try:
            tempfile.TemporaryFile(dir=base).close()  # fail at startup rather than at the first save
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
    """Remove the access of group and others from the server's own entries. The folder itself may be shared."""
    for path in base.iterdir():
        if _TOP.fullmatch(path.name):
            with suppress(OSError):  # owned by another user, or removed meanwhile
                mode = stat.S_IMODE(path.stat().st_mode)
                if mode & (stat.S_IRWXG | stat.S_IRWXO):
                    path.chmod(mode & stat.S_IRWXU)


def folders_of_kinds(base: Path) -> Iterator[Path]:
    """Yield the folders MODEL/KIND, the parents of all saved folders."""
    for model in base.iterdir():
        if model.is_dir() and not model.name.startswith("."):
            yield from (kind for kind in model.iterdir() if kind.is_dir())


def saved_folders(base: Path, bucket: str | None = None) -> set[str]:
    """Return the names MODEL/KIND/NAME of all saved folders on disk and in the bucket, as the database has them.

    Raises `StorageError` if the bucket fails.
    """
    kinds = (kind for kind in folders_of_kinds(base) if kind.name in KINDS)
    paths = (path for kind in kinds for path in kind.iterdir() if path.is_dir() and not path.name.startswith("."))
    remote = {} if bucket is None else folders_below(bucket, DEPTH)
    return {str(path.relative_to(base)) for path in paths} | {name for name, kept in remote.items() if kept.is_whole}


def remove_empty_folders(base: Path, kind: Path | None = None) -> None:
    """Remove empty folders MODEL/KIND, then empty folders MODEL. Saves recreate them as needed.

    Args:
        base: Checkpoint folder.
        kind: The only MODEL/KIND folder to check, together with its MODEL. None: all.
    """
    kinds = list(folders_of_kinds(base)) if kind is None else [kind]
    models = {path.parent for path in kinds} if kind is not None else set(base.iterdir())
    ours = {model for model in models if model.parent == base and _MODEL.fullmatch(model.name)}
    for path in (*(kind for kind in kinds if kind.parent in ours), *ours):
        with suppress(OSError):  # not empty, or already removed
            path.rmdir()


class Disk:
    """Disk budget of checkpoints. Rejects saves that would exceed it.

    Args:
        config: `checkpoints_base` and its limits.
        database: Source of the sizes of saved folders.
    """

    def __init__(self, config: EngineConfig, database: Database):
        self._config = config
        self._database = database
        self.collect: Callable[[], Awaitable[object]] | None = None
        """Runs garbage collection. None until the collector exists."""

    async def found(self) -> tuple[dict[str, int], int]:
        """Return (saved bytes by kind, free bytes of the disk)."""
        free = shutil.disk_usage(self._config.checkpoints_folder).free
        return await self._database.read(stored_bytes), free

    async def make_room(self, model_id: str, sampler: bool) -> None:
        """Make room for a save of a model. Runs garbage collection first, then removes the oldest trash entries.

        Args:
            model_id: Model to be saved.
            sampler: True if only the weights are saved, without optimizer state.

        Raises:
            RequestError: The save does not fit. The message has the usage, the limit and a way out.
        """
        await self.make_room_for(
            await self._database.read(partial(_expected_bytes, model_id=model_id, sampler=sampler))
        )

    async def make_room_for(self, size: int) -> None:
        """Make room for `size` bytes. Raises the same errors as `make_room`."""
        if await self._refusal(size) is None:
            return
        if self.collect is not None:
            await self.collect()
        left = await asyncio.to_thread(_trash_of, self._config)
        in_trash = sum(entry.size_bytes for entry in left)
        if (refusal := await self._refusal(size, without=in_trash)) is not None:
            raise RequestError(refusal)  # emptying the trash would not be enough
        while (refusal := await self._refusal(size)) is not None:
            if not left:
                raise RequestError(refusal)
            log.info("removing %s from the trash to free space", left[0].place)
            await asyncio.to_thread(left.pop(0).remove)

    async def _refusal(self, size: int, without: int = 0) -> str | None:
        """Return the reason why `size` bytes do not fit once `without` bytes are freed. None if they fit."""
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
    """List the entries of the trash. Raises `RequestError` if the bucket cannot be listed."""
    try:
        return trash.entries(config)
    except StorageError as error:
        raise RequestError(f"it is not known what the trash takes: {error}") from error


def stored_bytes(session: Session) -> dict[str, int]:
    """Return the total bytes of checkpoints, unnamed versions and snapshots. Rows of unknown size count 0."""
    columns = {
        "checkpoint": col(CheckpointRow.size_bytes),
        "version": col(VersionRow.size_bytes),
        "snapshot": col(ModelRow.snapshot_bytes),
    }
    return {kind: session.exec(select(func.sum(column))).one() or 0 for kind, column in columns.items()}


def _expected_bytes(session: Session, model_id: str, sampler: bool) -> int:
    """Estimate the bytes of a save of a model from its earlier saves. 0 if the model has no earlier save."""
    kind = "sampler_weights" if sampler else "weights"
    named = select(CheckpointRow.size_bytes).where(CheckpointRow.model_id == model_id, CheckpointRow.kind == kind)
    sizes = [session.exec(named.order_by(col(CheckpointRow.id).desc()).limit(1)).first()]
    if sampler:
        written = select(VersionRow.size_bytes).where(
            VersionRow.model_id == model_id, col(VersionRow.size_bytes).is_not(None)
        )
        sizes.append(session.exec(written.limit(1)).first())
    return max(size or 0 for size in sizes)
