"""The queued operations, and the futures of their results.

Each entry of the table of operations has a POST route that responds when the request is logged. `retrieve_future`
returns results.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from skyrl.algorithms.checks.requests import MAX_NUM_SAMPLES
from skyrl.tinker.database.fair_reads import fingerprint_of, sent
from skyrl.tinker.database.log.request_log import LargeResult
from skyrl.tinker.http.errors import error_response
from skyrl.tinker.http.routes.dependencies import (
    AnswerRoomDependency,
    BodyDependency,
    CallerDependency,
    QueueDependency,
    ServiceDependency,
    json_body,
)
from skyrl.tinker.identity.ids import SAMPLE
from skyrl.tinker.operations.operation import QueuedOperation
from skyrl.tinker.operations.table import OPERATIONS
from skyrl.tinker.requests.queue import TryAgain
from skyrl.tinker.results import JSON, PROTOBUF, Answer, Failure, Lost
from skyrl.tinker.wire import schemas
from skyrl.tinker.wire.legacy_json import as_json
from skyrl.tinker.wire.sharing import LARGE_BYTES
from skyrl.tinker.wire.strict_json import PIECE_BYTES

router = APIRouter()

MAX_INLINE_BYTES = 4 * 2**20
"""Maximum bytes of a result for clients with `allow_metadata_only`. If a result is larger, these clients get only its
size, and they request the result when they have room.
"""
JSON_COPIES = 3
"""Copies of a result in memory while it is encoded as JSON: the result, the message parsed from it, and its arrays."""


def _add_route(operation: QueuedOperation) -> None:
    async def submit(queue: QueueDependency, caller: CallerDependency, body: BodyDependency) -> schemas.FutureResponse:
        return schemas.FutureResponse(request_id=await queue.training.submit(operation, body, caller))

    router.post(f"/{operation.name}", name=operation.name, response_model_exclude_none=True)(submit)


for _operation in OPERATIONS.values():
    if _operation.name != SAMPLE:
        _add_route(_operation)


@router.post("/asample", response_model_exclude_none=True)
async def asample(queue: QueueDependency, caller: CallerDependency, body: BodyDependency) -> schemas.FutureResponse:
    """Queue a sample."""
    request_id, count = await queue.samples.submit(OPERATIONS[SAMPLE], body, caller)
    sequence_ids = [f"{request_id}:{index}" for index in range(min(count, MAX_NUM_SAMPLES))]  # more are refused
    return schemas.FutureResponse(request_id=request_id, sample_sequence_ids=sequence_ids)


@router.post(
    "/retrieve_future",
    response_model=None,
    responses={200: {"content": {PROTOBUF: {}}}, 408: {"model": schemas.TryAgainResponse}},
)
async def retrieve_future(
    request: Request,
    queue: QueueDependency,
    service: ServiceDependency,
    caller: CallerDependency,
    room: AnswerRoomDependency,
    body: Annotated[schemas.RetrieveFutureRequest, json_body(schemas.RetrieveFutureRequest)],
) -> Response:
    """Return the result of a queued request, after waiting up to one long poll."""
    as_it_is = PROTOBUF in request.headers.get("accept", "")
    outcome = await queue.outcome(body.request_id, caller)
    if isinstance(outcome, Answer | LargeResult):
        if body.allow_metadata_only and outcome.size > MAX_INLINE_BYTES:
            return _json(schemas.MetadataResponse(response_payload_size=outcome.size))
        room.grow_to(outcome.size * (1 if as_it_is else JSON_COPIES))
        if isinstance(outcome, LargeResult):
            outcome = await queue.read(body.request_id, outcome.size, caller)
    match outcome:
        case Answer(body=data, media_type=media_type):
            queue.handed_out(body.request_id)
            if media_type != PROTOBUF or as_it_is:
                return sent(outcome)
            pieces = as_json(body.request_id, data)
            if len(data) <= LARGE_BYTES:
                return Response(b"".join(pieces), media_type=JSON, headers=fingerprint_of(outcome))
            # Encode as the client reads, because the text is five times as long and should never exist as a whole.
            texts = service.decode_pool.pieces(caller.sharer, PIECE_BYTES, pieces)
            return StreamingResponse(texts, media_type=JSON, headers=fingerprint_of(outcome))
        case Failure(error=error, category=category):
            return _json(schemas.FailedResponse(error=error, category=category))
        case Lost():
            return error_response(410, f"request {body.request_id} is gone without a result; send it again")
        case TryAgain(queue_state=state, reason=reason):
            again = schemas.TryAgainResponse(request_id=body.request_id, queue_state=state, queue_state_reason=reason)
            return _json(again, 408)


@router.post("/retrieve_futures", response_model_exclude_none=True)
async def retrieve_futures(
    queue: QueueDependency,
    caller: CallerDependency,
    body: Annotated[schemas.RetrieveFuturesRequest, json_body(schemas.RetrieveFuturesRequest)],
) -> schemas.RetrieveFuturesResponse:
    """Return finished samples of one client, after waiting up to one long poll."""
    return await queue.samples.ended(body, caller)


@router.post("/cancel_future", status_code=204, response_class=Response)
async def cancel_future(
    queue: QueueDependency,
    caller: CallerDependency,
    body: Annotated[schemas.CancelFutureRequest, json_body(schemas.CancelFutureRequest)],
) -> None:
    """Drop a sample. Other requests (finished, unknown or training) are ignored."""
    queue.samples.cancel(body.request_id, caller)


def _json(model: Any, status: int = 200) -> JSONResponse:
    return JSONResponse(model.model_dump(exclude_none=True), status)
