"""State id: a random id that is in the checkpoint folder and in the database shows that the two belong together.

If the ids differ or one is missing, the server starts only if no data can be lost. Otherwise an operator has to run
`skyrl adopt`. The two ids cannot be written atomically. The database therefore first records the id that is about to be
written to the folder, so that the next start can complete an interrupted write.
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
"""Names of settings. TIED: the confirmed id of the folder. TO_BE_TIED: the id that is being written to the folder."""


@dataclass(frozen=True)
class Ids:
    """State ids of the folder and of the database. None if missing. `to_be` is an id whose write is unconfirmed."""

    folder: str | None
    database: str | None
    to_be: str | None

    @property
    def agree(self) -> bool:
        return self.folder is not None and self.folder in (self.database, self.to_be)


@dataclass(frozen=True)
class FolderContents:
    """Saved folders on disk and in the database."""

    there: set[str]
    """Existing folders."""
    written: set[str]
    """Folders that the database references and that were written completely."""
    models: set[str]
    """Folders of the models in the database."""

    @property
    def known(self) -> set[str]:
        """Existing folders of models in the database."""
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
    """Check that the folder and the database belong together.

    Writes a common id if both are empty, or are older than state ids.

    Raises:
        RequestError: They do not belong together. The message says how to inspect and fix this.
    """
    if (why := await asyncio.to_thread(refusal, config, database)) is not None:
        raise RequestError(why)
    await tie_anyway(config, database)


async def tie_anyway(config: EngineConfig, database: Database) -> None:
    """Write the same id to folder and database, unless they already agree. Does not check that they belong together."""
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
    """Return the reason why a server must not use this folder with this database, or None if it may."""
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
    """Read the current ids of the folder and the database."""

    def settings(session: Session) -> list[str | None]:
        rows = (session.get(SettingRow, name) for name in (TIED, TO_BE_TIED))
        return [row.value if row is not None else None for row in rows]

    return Ids(_of_folder(config), *database.read_now(settings))


def _of_folder(config: EngineConfig) -> str | None:
    """Read the id of the folder, or of the bucket if snapshots are stored in it. Returns None if there is no id."""
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
    """Write the id to the folder or bucket. Raises `StorageError`."""
    if config.snapshots_bucket is None:
        replace_file(config.checkpoints_folder / FILE, state_id.encode())
    else:
        ObjectStore(config.snapshots_bucket).put(FILE, state_id.encode())


def contents(config: EngineConfig, database: Readable) -> FolderContents:
    """List the saved folders on disk and in the database. Raises `RequestError` if the bucket cannot be listed."""
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
    """Return the folders that the database references and that were written completely."""
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
