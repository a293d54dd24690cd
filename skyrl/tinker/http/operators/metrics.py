"""Prometheus metrics."""

import asyncio
import time
from contextlib import suppress

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse, Response
from sqlalchemy.exc import SQLAlchemyError

from skyrl.tinker.context import Service
from skyrl.tinker.http.routes.dependencies import ServiceDependency, operator

router = APIRouter()

STORED_S = 5.0
"""Seconds for which disk usage is cached."""
PATIENCE_S = 2.0
"""Timeout in seconds for the database query of disk usage. After a timeout, the cached values are shown."""


@router.get("/metrics", response_class=PlainTextResponse, dependencies=[Depends(operator)])
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
