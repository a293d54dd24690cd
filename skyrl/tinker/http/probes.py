"""Probes for orchestrators, without a key. A live server is not necessarily ready."""

import asyncio
import platform
from contextlib import suppress
from functools import cache
from importlib import metadata
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import Session

from skyrl import __version__
from skyrl.tinker.context import Engine, Service
from skyrl.tinker.http.routes.dependencies import ServiceDependency
from skyrl.tinker.processes.engine_supervisor import READY, SILENT

router = APIRouter()

LIVEZ, READYZ, VERSION = "/livez", "/readyz", "/version"
PACKAGES = ("jax", "torch", "transformers", "vllm")
PATIENCE_S = 2.0
"""Time limit for an answer of the database in seconds."""


@router.get("/")
async def root() -> dict[str, str]:
    """Name of the server and its entry points."""
    return {
        "server": "SkyRL, a server of the Tinker API",
        "clients": "the tinker SDK, with TINKER_BASE_URL set to this address",
        "state": READYZ,
        "schema": "/openapi.json",
        "documentation": "docs/server.md in SkyRL's repository",
    }


@router.get(LIVEZ)
async def livez() -> dict[str, str]:
    """The process responds.

    If the engine or the database is unavailable, the process waits for it, so a restart would not help.
    """
    return {"status": "ok"}


@router.get(READYZ, response_model=None)
async def readyz(service: ServiceDependency) -> dict[str, Any] | JSONResponse:
    """The server processes requests: the engine is ready and the database responds.

    `slow` has the seconds for which other services, such as a bucket, have not answered. Clients can do without them.
    """
    if (reason := engine_trouble(service.engine)) is not None:
        return unready(reason)
    if not await _answers(service):
        return unready("the database does not answer")
    slow: dict[str, float] = {}
    for call in service.slow_calls():
        slow[call.service] = max(round(call.seconds, 1), slow.get(call.service, 0.0))
    return {"status": "ok", "slow": slow} if slow else {"status": "ok"}


@router.get(VERSION)
async def version() -> dict[str, str | dict[str, str]]:
    """Versions of the server, of Python, and of installed packages that affect numerical results."""
    return _versions()


@cache
def _versions() -> dict[str, str | dict[str, str]]:
    packages: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {"version": __version__, "python": platform.python_version(), "packages": packages}


def engine_trouble(engine: Engine) -> str | None:
    """Return the reason why requests are not processed, or None. It has no secrets, because probes need no key."""
    if engine.state != READY:
        return f"the engine is not ready: {engine.state}"
    return f"the engine is not ready: {SILENT}" if engine.progress == SILENT else None


async def _answers(service: Service) -> bool:
    """Return True if the database responds. Concurrent probes share one query, because they need no key."""
    if service.database_probe is None or service.database_probe.done():
        service.database_probe = asyncio.create_task(_ask_database(service))
    return await asyncio.shield(service.database_probe)


async def _ask_database(service: Service) -> bool:
    with suppress(TimeoutError, SQLAlchemyError):
        async with asyncio.timeout(PATIENCE_S):
            return await service.database.read(_ask)
    return False


def _ask(session: Session) -> bool:
    return session.connection().execute(text("SELECT 1")).scalar() == 1


def unready(detail: str) -> JSONResponse:
    """Return the readiness probe's response for a server that is not ready (status 503)."""
    return JSONResponse({"status": "not ready", "detail": detail}, 503)
