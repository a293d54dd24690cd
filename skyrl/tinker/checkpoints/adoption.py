"""Recovery of checkpoints that have files but no row, after a database restore or a move out of the trash."""

import re

from sqlmodel import Session, select

from skyrl.tinker.checkpoints.retention import named_folders
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.database.database import Database
from skyrl.tinker.database.tables import CheckpointRow, ModelRow
from skyrl.tinker.identity import ids
from skyrl.tinker.identity.ids import folder_of_model
from skyrl.utils.files.stored_folders import inspect_stored, modified_at

_FOLDER = re.compile(r"([^/]+)/(weights|sampler_weights|external_weights)/(.+)@(\d+)")


def nameless_checkpoints(config: EngineConfig, database: Database, there: set[str]) -> list[CheckpointRow]:
    """Create a row for each checkpoint that has none, in the order of their saves. The rows are not stored yet.

    The row of the model must exist, as it has the tenant and the LoRA configuration. The name must be free, and all
    files must exist. Metadata and time to live are lost, and the checkpoint is private.

    Args:
        config: Configuration of the server.
        database: Database without the rows.
        there: Existing folders, below the checkpoint folder or bucket.
    """
    return database.read_now(lambda session: _rows(session, config, there - named_folders(session)))


def path_of(row: CheckpointRow) -> str:
    """Return the `tinker://` path of a checkpoint."""
    return f"{ids.SCHEME}{row.model_id}/{row.kind}/{row.name}"


def _rows(session: Session, config: EngineConfig, nameless: set[str]) -> list[CheckpointRow]:
    models = {folder_of_model(row.model_id): row for row in session.exec(select(ModelRow)).all()}
    columns = (CheckpointRow.model_id, CheckpointRow.kind, CheckpointRow.name)
    taken = set(session.exec(select(*columns)).all())
    found: list[CheckpointRow] = []
    matches = [match for folder in nameless if (match := _FOLDER.fullmatch(folder)) is not None]
    for match in sorted(matches, key=lambda match: int(match[4]), reverse=True):  # the latest save of a name first
        model, kind, name = models.get(match[1]), match[2], match[3]
        written = inspect_stored(config.path_of(match[0]))
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
                created_at=modified_at(config.path_of(match[0])),
            )
        )
    return found[::-1]
