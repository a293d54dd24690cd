"""Audit events. Each is written in the transaction of the change that it describes."""

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
"""Actor of automatic actions: removal of objects that have expired or exceed a limit."""


def note(session: Session, event: AuditEvent, tenant: str, by: str, **details: Any) -> None:
    """Add an audit event.

    Args:
        session: Transaction to write in.
        event: Kind of the event.
        tenant: Owner of the object, who can read the event.
        by: Name of the actor.
        details: Further details, as JSON.
    """
    session.add(AuditRow(tenant=tenant, event=event, details={"by": by, **details}))


def note_checkpoint(session: Session, event: AuditEvent, row: CheckpointRow, by: str, **details: Any) -> None:
    """Add an audit event of a checkpoint, with its size."""
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
