"""Checkpoints whose files are there and whose rows are not: of a database that was put back, or out of the trash."""

import re
from pathlib import Path

from sqlmodel import Session, select

from skyrl.tinker.checkpoints.retention import named_folders
from skyrl.tinker.database.database import Database
from skyrl.tinker.database.tables import CheckpointRow, ModelRow
from skyrl.tinker.identity import ids
from skyrl.tinker.identity.ids import folder_of_model
from skyrl.utils.files.atomic_folders import inspect_folder

_FOLDER = re.compile(r"([^/]+)/(weights|sampler_weights|external_weights)/(.+)@(\d+)")


def nameless_checkpoints(base: Path, database: Database, there: set[str]) -> list[CheckpointRow]:
    """Rows for checkpoints that have none, in the order of their saves. None is stored yet.

    The database has to know the model, which says whose it is and what is trained; the name must be free, and all files
    there. What a checkpoint was saved with besides, metadata and a time to live, is not known any more; it is private.

    Args:
        base: Folder of checkpoints.
        database: Lacks the rows.
        there: Folders below `base`.
    """
    return database.read_now(lambda session: _rows(session, base, there - named_folders(session)))


def path_of(row: CheckpointRow) -> str:
    """The path that clients load a checkpoint by."""
    return f"{ids.SCHEME}{row.model_id}/{row.kind}/{row.name}"


def _rows(session: Session, base: Path, nameless: set[str]) -> list[CheckpointRow]:
    models = {folder_of_model(row.model_id): row for row in session.exec(select(ModelRow)).all()}
    columns = (CheckpointRow.model_id, CheckpointRow.kind, CheckpointRow.name)
    taken = set(session.exec(select(*columns)).all())
    found: list[CheckpointRow] = []
    matches = [match for folder in nameless if (match := _FOLDER.fullmatch(folder)) is not None]
    for match in sorted(matches, key=lambda match: int(match[4]), reverse=True):  # of two of a name, the later save
        model, kind, name = models.get(match[1]), match[2], match[3]
        written = inspect_folder(base / match[0])
        if model is None or written is None or (model.model_id, kind, name) in taken:
            continue
        taken.add((model.model_id, kind, name))
        found.append(
            CheckpointRow(
                model_id=model.model_id,
                kind=kind,
                name=name,
                tenant=model.tenant,
                version=ids.version_id(model.model_id, int(match[4])),
                folder=match[0],
                base_model=model.base_model,
                lora_config=model.lora_config,
                size_bytes=written.size_bytes,
                digest=written.digest,
                created_at=(base / match[0]).stat().st_mtime,
            )
        )
    return found[::-1]
