"""Rows of captured sessions."""

from collections.abc import Sequence

from sqlalchemy import delete
from sqlmodel import Session, col

from skyrl.tinker.database.tables import CaptureAnswerRow, CaptureRow


def remove_captures(session: Session, ids: Sequence[int | None]) -> None:
    """Delete captured sessions with their answers."""
    session.execute(delete(CaptureAnswerRow).where(col(CaptureAnswerRow.capture_id).in_(ids)))
    session.execute(delete(CaptureRow).where(col(CaptureRow.id).in_(ids)))
