"""Routes that a client asks before anything else, and those where it tells about itself."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from skyrl.algorithms.losses import CUSTOM
from skyrl.tinker.http.operators.probes import engine_trouble
from skyrl.tinker.http.routes.dependencies import CallerDependency, ServiceDependency
from skyrl.tinker.wire import schemas

router = APIRouter()
public = APIRouter()
"""Routes that need no key."""


@public.get("/healthz", response_model=None)
async def healthz(service: ServiceDependency) -> schemas.HealthResponse | JSONResponse:
    """Return True if requests are being worked on."""
    if (reason := engine_trouble(service.engine)) is None:
        return schemas.HealthResponse(engine=service.engine.metrics)
    return JSONResponse({"status": "starting", "detail": reason}, 503)


@router.post("/client/config")
async def client_config(service: ServiceDependency, _: CallerDependency) -> schemas.ClientConfigResponse:
    """Settings for talking to this server. The request (the client's version) changes nothing."""
    return schemas.ClientConfigResponse(custom_loss_server_side=CUSTOM not in service.config.refused_losses)


@router.post("/client/dynamic_config")
async def dynamic_config(_: CallerDependency) -> schemas.DynamicConfigResponse:
    """Settings that may change while a client runs: none, here."""
    return schemas.DynamicConfigResponse()


@public.post("/telemetry")
async def telemetry() -> schemas.TelemetryResponse:
    """Events about the client. None are kept, and none is refused: a client waits for this when it exits."""
    return schemas.TelemetryResponse()


@router.get("/get_server_capabilities")
async def get_server_capabilities(
    service: ServiceDependency, _: CallerDependency
) -> schemas.ServerCapabilitiesResponse:
    """The names of the base model, the one that the server itself uses first."""
    info = await service.wait_until_ready()
    length = info.max_context_length
    return schemas.ServerCapabilitiesResponse(
        supported_models=[
            schemas.SupportedModel(model_name=name, max_context_length=length) for name in service.served_names()
        ]
    )
