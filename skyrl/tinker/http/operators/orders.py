"""Commands of operators: cancel a request, unload a model."""

import logging
from typing import Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from skyrl.tinker.database.log.request_log import UNLOAD, LargeResult
from skyrl.tinker.http.routes.dependencies import QueueDependency, operator
from skyrl.tinker.identity.callers import EVERYBODY
from skyrl.tinker.operations.table import OPERATIONS
from skyrl.tinker.requests.outcomes import CANCELLED
from skyrl.tinker.requests.queue import RequestQueue
from skyrl.tinker.results import JSON, Answer, Failure, Lost, Outcome
from skyrl.tinker.wire import strict_json
from skyrl.tinker.wire.parsing import Body

router = APIRouter(dependencies=[Depends(operator)])
log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Seconds that a command waits for its result."""


class CommandStatus(BaseModel):
    """Result of a command, as far as it is known."""

    request_id: str
    state: Literal["done", "failed", "pending"]
    """State of the cancelled request, or of the request that unloads the model."""
    cancelled: bool = False
    error: str | None = None
    """Error message that the client of the request receives."""


@router.post("/operator/requests/{request_id}/cancel")
async def cancel_request(queue: QueueDependency, request_id: str) -> CommandStatus:
    """Make a training request or a sample fail. A training request fails at its position in its model's order."""
    await queue.cancel(request_id)
    log.warning("request %s is cancelled by an operator", request_id)
    return _obeyed(request_id, await _ended(queue, request_id))


@router.post("/operator/models/{model_id}/unload")
async def unload_model(queue: QueueDependency, model_id: str) -> CommandStatus:
    """Unload a model as its client could. Its training state is freed after all requests that have arrived."""
    body = Body(strict_json.dumps({"model_id": model_id}), JSON)
    request_id = await queue.training.submit(OPERATIONS[UNLOAD], body, EVERYBODY)
    log.warning("model %s is unloaded by an operator", model_id)
    return _obeyed(request_id, await _ended(queue, request_id))


async def _ended(queue: RequestQueue, request_id: str) -> Outcome | LargeResult | None:
    future = queue.futures.get(request_id)
    if future is not None:
        return await future.wait(PATIENCE_S)
    outcome = await queue.outcome(request_id, EVERYBODY)  # it ended long ago
    return outcome if isinstance(outcome, Answer | Failure | Lost | LargeResult) else None


def _obeyed(request_id: str, outcome: Outcome | LargeResult | None) -> CommandStatus:
    if outcome is None:
        return CommandStatus(request_id=request_id, state="pending")
    if isinstance(outcome, Failure):
        cancelled = outcome.error == CANCELLED
        return CommandStatus(request_id=request_id, state="failed", cancelled=cancelled, error=outcome.error)
    return CommandStatus(request_id=request_id, state="failed" if isinstance(outcome, Lost) else "done")
