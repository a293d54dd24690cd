"""Events of the audit log. Each is written in the transaction of what it tells of."""

from typing import Any, Literal

from sqlmodel import Session

from skyrl.tinker.database.tables import AuditRow, CheckpointRow, ModelRow, SessionRow
from skyrl.tinker.identity.ids import SCHEME

AuditEvent = Literal[
    "checkpoint_create",
    "checkpoint_delete",
    "checkpoint_publish",
    "checkpoint_unpublish",
    "checkpoint_ttl_set",
    "checkpoint_read",
    "project_session_set",
]
SERVER = "server"
"""Actor of automatic actions: the collection of what has expired or exceeds a limit."""


def note(session: Session, event: AuditEvent, tenant: str, by: str, **details: Any) -> None:
    """Somebody has done something.

    Args:
        session: Transaction to write in.
        event: What it was.
        tenant: Owner of what it was done to, who may read of it.
        by: Name of who has done it.
        details: Whatever else there is to tell, as JSON.
    """
    session.add(AuditRow(tenant=tenant, event=event, details={"by": by, **details}))


def note_checkpoint(session: Session, event: AuditEvent, row: CheckpointRow, by: str, **details: Any) -> None:
    """Somebody has done something to a checkpoint, which is told with what storing it cost."""
    model = session.get(ModelRow, row.model_id)
    owner = None if model is None else session.get(SessionRow, model.session_id)
    note(
        session,
        event,
        row.tenant,
        by,
        tinker_path=f"{SCHEME}{row.model_id}/{row.kind}/{row.name}",
        model_id=row.model_id,
        session_id=None if owner is None else owner.session_id,
        project_id=None if owner is None else owner.project_id,
        base_model=row.base_model,
        size_bytes=row.size_bytes,
        stored_since=row.created_at,
        **details,
    )
