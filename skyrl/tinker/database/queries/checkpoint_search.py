"""Search for checkpoints. The cursor of a page names its last checkpoint, so concurrent changes do not shift the next
page."""

from collections.abc import Iterator
from itertools import islice
from uuid import UUID

from sqlmodel import Session, col, select

from skyrl.tinker.database.queries import listings
from skyrl.tinker.database.queries.session_search import NO_PROJECT, ROUNDING_S
from skyrl.tinker.database.tables import CheckpointRow, ModelRow, SessionRow
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.wire import management_schemas as rest
from skyrl.tinker.wire.search_schemas import CheckpointSearchCursor, CheckpointSearchRequest, CheckpointSearchResponse


def search(session: Session, caller: Caller, request: CheckpointSearchRequest) -> CheckpointSearchResponse:
    """Return a page of matching checkpoints. A job for `Database.read`."""
    found = list(islice(_matching(session, caller, request), request.limit + 1))
    page = found[: request.limit]
    cursor = None
    if len(found) > len(page):
        cursor = CheckpointSearchCursor(
            last_created_at=rest.moment(page[-1].created_at), last_checkpoint_uuid=_uuid(page[-1])
        )
    return CheckpointSearchResponse(checkpoints=[listings.checkpoint(row) for row in page], next_cursor=cursor)


def _matching(session: Session, caller: Caller, request: CheckpointSearchRequest) -> Iterator[CheckpointRow]:
    """Yield matching checkpoints, newest first."""
    owners = request.owner.owner_urns
    if owners is not None and caller.urn not in owners:
        return
    visible = listings.readable(caller) if request.owner.type == "accessible" else listings.own_checkpoints(caller)
    query = (
        select(CheckpointRow, SessionRow.project_id)
        .join(ModelRow, col(ModelRow.model_id) == col(CheckpointRow.model_id), isouter=True)
        .join(SessionRow, col(SessionRow.session_id) == col(ModelRow.session_id), isouter=True)
        .where(visible)
        .order_by(*listings.newest_first())
    )
    if request.checkpoint_type is not None:
        query = query.where(CheckpointRow.kind == rest.KINDS[request.checkpoint_type])
    if request.base_models is not None:
        query = query.where(col(CheckpointRow.base_model).in_(request.base_models))
    cursor = request.cursor
    if cursor is not None:
        query = query.where(CheckpointRow.created_at <= cursor.last_created_at.timestamp() + ROUNDING_S)
    behind = (cursor.last_created_at, cursor.last_checkpoint_uuid) if cursor is not None else None
    for row, project_id in session.exec(query.execution_options(yield_per=200)):
        if (
            (behind is None or (rest.moment(row.created_at), _uuid(row)) < behind)
            and (request.project_ids is None or (project_id or NO_PROJECT) in request.project_ids)
            and request.user_metadata.items() <= (row.user_metadata or {}).items()
        ):
            yield row


def _uuid(row: CheckpointRow) -> UUID:
    """Return the row's number as a UUID. UUIDs sort like the numbers."""
    assert row.id is not None, "it is stored"
    return UUID(int=row.id)
