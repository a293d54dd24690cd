"""Route that checks and stores traced losses. Passes of the same session refer to a stored loss."""

from typing import Annotated

from fastapi import APIRouter
from sqlmodel import Session, col, func, select

from skyrl.algorithms.losses import CUSTOM
from skyrl.algorithms.traced.graph import specification_of
from skyrl.algorithms.traced.objective import check_new
from skyrl.errors import RequestError
from skyrl.tinker.database.tables import CustomLossRow
from skyrl.tinker.http.routes.dependencies import CallerDependency, ServiceDependency, json_body
from skyrl.tinker.identity import ids
from skyrl.tinker.operations.training import refuse_by_operator
from skyrl.tinker.wire import schemas
from skyrl.tinker.wire.sharing import LARGE_BYTES

router = APIRouter()

MAX_GRAPH_BYTES = 2**18
"""Maximum size of a request: 1 KiB for each node that a graph may have."""
MAX_LOSSES = 256
"""Maximum number of losses in a tenant's sessions. Each is compiled separately."""


@router.post("/create_custom_loss", response_model_exclude_none=True)
async def create_custom_loss(
    service: ServiceDependency,
    caller: CallerDependency,
    request: Annotated[
        schemas.CreateCustomLossRequest, json_body(schemas.CreateCustomLossRequest, max_bytes=MAX_GRAPH_BYTES)
    ],
) -> schemas.FutureResponse:
    """Store a loss.

    Requests with the same session and number refer to the same loss. An unsupported loss is rejected here, not when a
    pass uses it.
    """
    refuse_by_operator(service.config.refused_losses, CUSTOM)
    owner = await service.directory.session(request.session_id, caller)
    if owner.finished_at is not None:
        raise RequestError(f"session {request.session_id} is finished; start a new ServiceClient")
    loss_id = ids.custom_loss_id(request.session_id, request.custom_loss_seq_id)
    specification = await service.decode_pool.run(caller.sharer, LARGE_BYTES + 1, lambda: checked(request))

    def insert(session: Session) -> None:
        same = session.get(CustomLossRow, loss_id)
        if same is not None:
            if same.specification != specification:
                raise RequestError(
                    f"custom_loss_seq_id={request.custom_loss_seq_id} is in use for another loss of this session; use "
                    "the next number"
                )
            return
        count = select(func.count()).where(col(CustomLossRow.tenant) == owner.tenant)
        if session.exec(count).one() >= MAX_LOSSES:
            raise RequestError(
                f"your sessions have {MAX_LOSSES} custom losses, the most that a client may have; pass numbers that "
                "change as an input of rank 0 rather than as constants of a new loss. Those of sessions that ended go "
                "when their requests do, after --session-retention-sec"
            )
        row = CustomLossRow(
            loss_id=loss_id,
            session_id=request.session_id,
            tenant=owner.tenant,
            name=request.name,
            specification=specification,
        )
        session.add(row)

    await service.database.write(insert)
    return schemas.FutureResponse(request_id=ids.custom_loss_request_id(loss_id))


def checked(request: schemas.CreateCustomLossRequest) -> str:
    """Return the loss in normal form. Raises `RequestError` for an unsupported loss."""
    specification = specification_of(
        [(one.name, one.rank) for one in request.inputs], [node.model_dump() for node in request.graph.nodes]
    )
    check_new(specification)
    return specification
