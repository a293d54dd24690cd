"""A folder of checkpoints and a database that belong together: both hold the same random id.

A server that finds another id in one than in the other, or none, goes on only where nothing can be lost by it; else a
person has to look (`skyrl adopt`). Both ids cannot be written at once: the database first takes down which id is about
to be written into the folder, so that a kill in between leaves what the next start finishes.
"""

import asyncio
from dataclasses import dataclass
from uuid import uuid4

from sqlmodel import Session, col, select

from skyrl.errors import RequestError, StorageError
from skyrl.tinker.checkpoints.disk_budget import saved_folders
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.database.database import Database
from skyrl.tinker.database.read_only import Readable
from skyrl.tinker.database.tables import CheckpointRow, ModelRow, SettingRow, VersionRow
from skyrl.tinker.identity.ids import folder_of_model
from skyrl.utils.failpoints import crash_point
from skyrl.utils.files.atomic_folders import replace_file
from skyrl.utils.files.object_store import ObjectStore

FILE = ".state-id"
TIED = "state_id"
TO_BE_TIED = "state_id_of_folder_to_be"
"""Settings: the id of the folder, and one that is being written into it."""


@dataclass(frozen=True)
class Ids:
    """Ids that each side names."""

    folder: str | None
    database: str | None
    to_be: str | None

    @property
    def agree(self) -> bool:
        return self.folder is not None and self.folder in (self.database, self.to_be)


@dataclass(frozen=True)
class FolderContents:
    """Contents of a folder, and what a database names of it."""

    there: set[str]
    """Folders that are there."""
    written: set[str]
    """Folders that the database names and that have been there."""
    models: set[str]
    """Folders of models that the database knows."""

    @property
    def known(self) -> set[str]:
        """Folders that are there of models that the database knows."""
        return {folder for folder in self.there if folder.partition("/")[0] in self.models}

    @property
    def missing(self) -> set[str]:
        return self.written - self.there

    @property
    def words(self) -> str:
        return (
            f"The folder holds {len(self.there)} saved folders, {len(self.known)} of them of models that the database "
            f"knows; of {len(self.written)} folders that the database names, {len(self.missing)} are missing"
        )


async def tie(config: EngineConfig, database: Database) -> None:
    """See to it that a folder and a database belong together. A new pair, and one from before there were ids, is tied.

    Raises:
        RequestError: They do not. The message says how to find out more, and what to do.
    """
    if (why := await asyncio.to_thread(refusal, config, database)) is not None:
        raise RequestError(why)
    await tie_anyway(config, database)


async def tie_anyway(config: EngineConfig, database: Database) -> None:
    """Write the same id into both, unless it is there."""
    ids = await asyncio.to_thread(read, config, database)
    if ids.agree and ids.to_be is None:
        return
    state_id = ids.folder if ids.agree and ids.folder else uuid4().hex
    await database.write(lambda session: _set(session, {TO_BE_TIED: state_id}))
    crash_point("start: state id in the database, not in the folder")
    try:
        await asyncio.to_thread(_write, config, state_id)
    except StorageError as error:
        raise RequestError(f"checkpoints_base={config.checkpoints_base}: {error}") from error
    crash_point("start: state id in the folder, not confirmed")
    await database.write(lambda session: _set(session, {TIED: state_id, TO_BE_TIED: None}))


def refusal(config: EngineConfig, database: Readable) -> str | None:
    """Reason why a server must not go on with these two, if it must not."""
    ids = read(config, database)
    if ids.agree:
        return None
    found = contents(config, database)
    if not found.there and not found.written:
        return None
    if ids.folder is None and ids.database is None and found.known:
        return None
    which = "neither has an id" if not (ids.folder or ids.database) else f"their ids differ (the folder's is in {FILE})"
    if (ids.folder is None) != (ids.database is None):
        which = f"the {'folder' if ids.folder is None else 'database'} has no id, the other has one"
    return (
        f"checkpoints_base={config.snapshots_bucket or config.checkpoints_folder} and database_url={database.url} do "
        f"not belong together: {which}. {found.words}. "
        "Correct --checkpoints-base or --database-url (is a disk not mounted?); if both are right, look with "
        "skyrl adopt --dry-run, then tie them with skyrl adopt (same options)"
    )


def read(config: EngineConfig, database: Readable) -> Ids:
    """Ids that each side names now."""

    def settings(session: Session) -> list[str | None]:
        rows = (session.get(SettingRow, name) for name in (TIED, TO_BE_TIED))
        return [row.value if row is not None else None for row in rows]

    return Ids(_of_folder(config), *database.read_now(settings))


def _of_folder(config: EngineConfig) -> str | None:
    """Id of the folder, or of the bucket if snapshots are there."""
    bucket = config.snapshots_bucket
    try:
        data = (config.checkpoints_folder / FILE).read_bytes() if bucket is None else ObjectStore(bucket).get(FILE)
        return (data or b"").decode().strip() or None
    except FileNotFoundError:
        return None
    except StorageError as error:
        raise RequestError(f"checkpoints_base={bucket}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        place = bucket or config.checkpoints_folder
        raise RequestError(
            f"checkpoints_base={place}: {FILE} cannot be read ({error}); check its permissions"
        ) from error


def _write(config: EngineConfig, state_id: str) -> None:
    """Raises `StorageError`."""
    if config.snapshots_bucket is None:
        replace_file(config.checkpoints_folder / FILE, state_id.encode())
    else:
        ObjectStore(config.snapshots_bucket).put(FILE, state_id.encode())


def contents(config: EngineConfig, database: Readable) -> FolderContents:
    """Contents of both sides. Raises `RequestError` if a bucket does not tell its own."""
    try:
        there = saved_folders(config.checkpoints_folder, config.checkpoints_bucket)
    except StorageError as error:
        raise RequestError(f"checkpoints_base={config.checkpoints_base}: {error}") from error

    def named(session: Session) -> FolderContents:
        written = written_folders(session)
        models = {folder_of_model(model_id) for model_id in session.exec(select(ModelRow.model_id)).all()}
        return FolderContents(there, written, models | {folder.partition("/")[0] for folder in written})

    return database.read_now(named)


def written_folders(session: Session) -> set[str]:
    """Folders that the database names and that have been there."""
    written = {*session.exec(select(CheckpointRow.folder)).all()}
    written |= {folder for folder in session.exec(select(ModelRow.snapshot_folder)).all() if folder is not None}
    return written | {*session.exec(select(VersionRow.folder).where(col(VersionRow.digest).is_not(None))).all()}


def _set(session: Session, values: dict[str, str | None]) -> None:
    for name, value in values.items():
        row = session.get(SettingRow, name)
        if value is None:
            if row is not None:
                session.delete(row)
        elif row is None:
            session.add(SettingRow(name=name, value=value))
        else:
            row.value = value
