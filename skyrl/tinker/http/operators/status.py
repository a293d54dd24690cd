"""Status of the server for operators, who see all tenants by their display names."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response
from sqlalchemy.exc import SQLAlchemyError

from skyrl.tinker.context import Service
from skyrl.tinker.http.operators.metrics import PATIENCE_S, look_at_disk
from skyrl.tinker.http.routes.dependencies import QueueDependency, ServiceDependency, operator
from skyrl.tinker.results import JSON
from skyrl.tinker.status import models, overview
from skyrl.tinker.status.requests import Requests, State
from skyrl.tinker.wire import strict_json

router = APIRouter(dependencies=[Depends(operator)])

Limit = Annotated[int, Query(ge=1, le=10_000)]


@router.get("/status", response_model=None)
async def get_status(service: ServiceDependency, queue: QueueDependency) -> Response:
    """State of the whole server. Also answered while the database is unavailable."""
    states = queue.training.engine_models.states()
    busy = {owed.model_id for owed in queue.training.waiting()}
    idle = [model_id for model_id in states if model_id not in busy][: overview.MOST_MODELS]
    _, owners = await asyncio.gather(look_at_disk(service), _owners(service, idle))
    return await _answer(partial(overview.overview, service, Requests(service, queue), states, owners))


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
    return await _answer(partial(requests.told, limit, tenant=tenant, model=model, kind=kind, state=state))


@router.get("/operator/models", response_model=None)
async def list_models(
    service: ServiceDependency, queue: QueueDependency, limit: Limit = 100, tenant: str | None = None
) -> Response:
    """Models that accept requests, most recently used first."""
    owner = None if tenant is None else service.names.tenant(tenant)
    rows, total = await service.database.read(partial(models.newest, limit=limit, tenant=owner))
    states, requests = queue.training.engine_models.states(), Requests(service, queue)
    return await _answer(lambda: {"models": models.described(rows, states, requests), "total": total})


async def _owners(service: Service, model_ids: list[str]) -> dict[str, str]:
    if model_ids:
        with suppress(TimeoutError, SQLAlchemyError):
            async with asyncio.timeout(PATIENCE_S):
                return await service.database.read(partial(models.tenants_of, model_ids=model_ids))
    return {}


async def _answer(make: Callable[[], dict[str, Any]]) -> Response:
    """Create JSON in a thread, because thousands of requests take a while and would block the event loop."""
    return Response(await asyncio.to_thread(lambda: strict_json.dumps(make())), media_type=JSON)
