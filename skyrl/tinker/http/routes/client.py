"""Routes that a client calls when it starts (health, settings, capabilities), and telemetry."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from skyrl.algorithms.losses import CUSTOM
from skyrl.tinker.http.probes import engine_trouble
from skyrl.tinker.http.routes.dependencies import CallerDependency, ServiceDependency
from skyrl.tinker.wire import schemas

router = APIRouter()
public = APIRouter()
"""Routes that need no key."""


@public.get("/healthz", response_model=None)
async def healthz(service: ServiceDependency) -> schemas.HealthResponse | JSONResponse:
    """Health of the server: status 200 if it processes requests, 503 with the reason otherwise."""
    if (reason := engine_trouble(service.engine)) is None:
        return schemas.HealthResponse(engine=service.engine.metrics)
    return JSONResponse({"status": "starting", "detail": reason}, 503)


@router.post("/client/config")
async def client_config(service: ServiceDependency, _: CallerDependency) -> schemas.ClientConfigResponse:
    """Client settings for this server. They do not depend on the request (the client's version)."""
    return schemas.ClientConfigResponse(custom_loss_server_side=CUSTOM not in service.config.refused_losses)


@router.post("/client/dynamic_config")
async def dynamic_config(_: CallerDependency) -> schemas.DynamicConfigResponse:
    """Settings that a client reads again while it runs. They never change here."""
    return schemas.DynamicConfigResponse()


@public.post("/telemetry")
async def telemetry() -> schemas.TelemetryResponse:
    """Accept and discard events of a client. A client waits for this response when it exits."""
    return schemas.TelemetryResponse()


@router.get("/get_server_capabilities")
async def get_server_capabilities(
    service: ServiceDependency, _: CallerDependency
) -> schemas.ServerCapabilitiesResponse:
    """All names of the base model: its own name first, then the aliases."""
    info = await service.wait_until_ready()
    length = info.max_context_length
    return schemas.ServerCapabilitiesResponse(
        supported_models=[
            schemas.SupportedModel(model_name=name, max_context_length=length) for name in service.served_names()
        ]
    )
