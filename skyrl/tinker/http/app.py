"""The FastAPI application: routes, error handlers and body limits around a `TinkerServer`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from skyrl.tinker.config import EngineConfig, is_loopback
from skyrl.tinker.context import EngineFactory
from skyrl.tinker.http import openapi, operators, probes
from skyrl.tinker.http.body_limit import BodyLimit
from skyrl.tinker.http.errors import add_error_handlers, error_response
from skyrl.tinker.http.middleware import LocalOnly, Measured
from skyrl.tinker.http.openai import captures, chat, completions, generate, messages, responses
from skyrl.tinker.http.routes import (
    accounts,
    checkpoints,
    downloads,
    held_checkpoints,
    losses,
    models,
    queued,
    samplers,
    sessions,
    traces,
)
from skyrl.tinker.identity.ids import SAMPLE
from skyrl.tinker.operations.operation import SMALL_BODY
from skyrl.tinker.operations.table import OPERATIONS
from skyrl.tinker.processes.engine_supervisor import EngineSupervisor
from skyrl.tinker.server import TinkerServer
from skyrl.tinker.wire.json_numbers import MAX_REST_BYTES

PREFIX = "/api/v1"
OPENAI_PATHS = "/v1/", "/oai/api/v1/", "/anthropic/api/v1/", "/sessions/"
OPENAI_PREFIXES = "/v1", "/oai/api/v1", "/anthropic/api/v1", "/sessions/{session}/v1"


def create_app(
    config: EngineConfig, make_engine: EngineFactory = EngineSupervisor, only_samples: bool = False
) -> FastAPI:
    """Create the application. Its lifespan opens the database and starts the engine; `app.state.server` is the server.

    Args:
        config: Options of the server.
        make_engine: Factory of the engine; tests pass their own.
        only_samples: Serve the routes of OpenAI's form, without the Tinker API.
    """
    server = TinkerServer(config, make_engine)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await server.start()
        try:
            yield
        finally:
            await server.stop()

    # FastAPI's pages of the document load scripts from other servers.
    app = FastAPI(title="SkyRL Tinker server", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    # Routes are matched in this order, so the most frequent ones come first.
    modules = (
        queued,
        sessions,
        accounts,
        models,
        losses,
        samplers,
        checkpoints,
        downloads,
        held_checkpoints,
        traces,
    )
    public = (accounts.public, downloads.public, held_checkpoints.public, traces.public)
    routers = [] if only_samples else [*(module.router for module in modules), *public]
    for router in routers:
        app.include_router(router, prefix=PREFIX, responses=openapi.ERRORS)
    openapi.complete(app, PREFIX, routers)
    for prefix in OPENAI_PREFIXES:
        for module in (completions, chat, messages, responses, captures):
            app.include_router(module.router, prefix=prefix, include_in_schema=False)
    app.include_router(generate.router, include_in_schema=False)
    app.include_router(probes.router)
    app.include_router(operators.router, responses=openapi.ERRORS)
    add_error_handlers(app)
    limits = {
        f"{PREFIX}/{'asample' if operation.name == SAMPLE else operation.name}": operation.max_body_bytes
        for operation in OPERATIONS.values()
    }

    def limit_of(path: str) -> int:
        if path.startswith(PREFIX + held_checkpoints.UPLOADS.partition("{")[0]):
            return held_checkpoints.MAX_FILE_BYTES
        if path == generate.PATH or path.startswith(OPENAI_PATHS):
            return min(MAX_REST_BYTES, config.max_body_bytes)
        return min(limits.get(path, SMALL_BODY) or config.max_body_bytes, config.max_body_bytes)

    def has_place(path: str) -> bool:
        return limits.get(path, SMALL_BODY) is None

    app.add_middleware(BodyLimit, limit_of=limit_of, has_place=has_place)
    if not config.api_keys:
        app.add_middleware(LocalOnly, check_host=is_loopback(config.host), refuse=error_response)
    app.add_middleware(Measured, prefix=PREFIX, access_log=config.access_log)
    return app
