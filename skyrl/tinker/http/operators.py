"""Routes for operators, outside the API: metrics, status, usage of all tenants, and commands."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import AwareDatetime, BaseModel
from sqlalchemy.exc import SQLAlchemyError

from skyrl.errors import RequestError
from skyrl.tinker.context import Service
from skyrl.tinker.database.ledger.billing import hour_of
from skyrl.tinker.database.ledger.tenant_usage import Period, usage_of_all
from skyrl.tinker.database.log.request_log import UNLOAD, LargeResult
from skyrl.tinker.http.routes.dependencies import QueueDependency, ServiceDependency, operator
from skyrl.tinker.identity.callers import EVERYBODY
from skyrl.tinker.operations.table import OPERATIONS
from skyrl.tinker.requests.outcomes import CANCELLED
from skyrl.tinker.requests.queue import RequestQueue
from skyrl.tinker.results import JSON, Answer, Failure, Lost, Outcome
from skyrl.tinker.status import MOST_MODELS, Requests, State, described_models, newest_models, overview, tenants_of
from skyrl.tinker.wire import management_schemas as rest
from skyrl.tinker.wire import strict_json
from skyrl.tinker.wire.parsing import Body

router = APIRouter(dependencies=[Depends(operator)])
log = logging.getLogger(__name__)

STORED_S = 5.0
"""Seconds for which disk usage is cached."""
PATIENCE_S = 2.0
"""Timeout in seconds for database queries of metrics and status. After a timeout, cached values are shown."""


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: ServiceDependency, request: Request) -> Response:
    """Metrics of the server, in Prometheus' text format or as OpenMetrics."""
    await look_at_disk(service)
    body, media_type = await asyncio.to_thread(service.metrics.text, request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": media_type})


async def look_at_disk(service: Service) -> None:
    """Update disk usage, unless it was updated recently."""
    storage = service.metrics.storage
    if time.monotonic() - storage.looked_at > STORED_S:
        storage.looked_at = time.monotonic()
        with suppress(TimeoutError, SQLAlchemyError, OSError):
            async with asyncio.timeout(PATIENCE_S):
                storage.found(*await service.disk.found())


Limit = Annotated[int, Query(ge=1, le=10_000)]


@router.get("/status", response_model=None)
async def get_status(service: ServiceDependency, queue: QueueDependency) -> Response:
    """State of the whole server. Also answered while the database is unavailable."""
    states = queue.training.engine_models.states()
    busy = {owed.model_id for owed in queue.training.waiting()}
    idle = [model_id for model_id in states if model_id not in busy][:MOST_MODELS]
    _, owners = await asyncio.gather(look_at_disk(service), _owners(service, idle))
    return await _json(partial(overview, service, Requests(service, queue), states, owners))


@router.get("/operator/requests", response_model=None)
async def list_requests(
    service: ServiceDependency,
    queue: QueueDependency,
    limit: Limit = 100,
    tenant: str | None = None,
    model: str | None = None,
    kind: str | None = None,
    state: State | None = None,
) -> Response:
    """Waiting and running requests, oldest first."""
    requests = Requests(service, queue)
    return await _json(partial(requests.told, limit, tenant=tenant, model=model, kind=kind, state=state))


@router.get("/operator/models", response_model=None)
async def list_models(
    service: ServiceDependency, queue: QueueDependency, limit: Limit = 100, tenant: str | None = None
) -> Response:
    """Models that accept requests, most recently used first."""
    owner = None if tenant is None else service.names.tenant(tenant)
    rows, total = await service.database.read(partial(newest_models, limit=limit, tenant=owner))
    states, requests = queue.training.engine_models.states(), Requests(service, queue)
    return await _json(lambda: {"models": described_models(rows, states, requests), "total": total})


async def _owners(service: Service, model_ids: list[str]) -> dict[str, str]:
    if model_ids:
        with suppress(TimeoutError, SQLAlchemyError):
            async with asyncio.timeout(PATIENCE_S):
                return await service.database.read(partial(tenants_of, model_ids=model_ids))
    return {}


async def _json(make: Callable[[], dict[str, Any]]) -> Response:
    """Create JSON in a thread, because thousands of requests take a while and would block the event loop."""
    return Response(await asyncio.to_thread(lambda: strict_json.dumps(make())), media_type=JSON)


@router.get("/operator/usage", response_model=rest.TenantUsageResponse)
async def get_usage_of_all(
    service: ServiceDependency,
    starting_on: AwareDatetime | None = None,
    ending_before: AwareDatetime | None = None,
    per: Period = "total",
) -> Response:
    """Return the usage of every tenant in a window of whole hours. Default: since the first hour of the ledger."""
    begin = None if starting_on is None else hour_of("starting_on", starting_on)
    end = None if ending_before is None else hour_of("ending_before", ending_before)
    if begin is not None and end is not None and end <= begin:
        raise RequestError(f"ending_before={ending_before} has to be after starting_on={starting_on}; exchange them")
    job = partial(usage_of_all, names=service.names, begin=begin, end=end, per=per, now=time.time())
    return await service.listings.answer(EVERYBODY, job)


COMMAND_PATIENCE_S = 5.0
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
        return await future.wait(COMMAND_PATIENCE_S)
    outcome = await queue.outcome(request_id, EVERYBODY)  # it ended long ago
    return outcome if isinstance(outcome, Answer | Failure | Lost | LargeResult) else None


def _obeyed(request_id: str, outcome: Outcome | LargeResult | None) -> CommandStatus:
    if outcome is None:
        return CommandStatus(request_id=request_id, state="pending")
    if isinstance(outcome, Failure):
        cancelled = outcome.error == CANCELLED
        return CommandStatus(request_id=request_id, state="failed", cancelled=cancelled, error=outcome.error)
    return CommandStatus(request_id=request_id, state="failed" if isinstance(outcome, Lost) else "done")
