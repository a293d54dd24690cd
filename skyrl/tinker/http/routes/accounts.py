"""Routes for keys, for tokens that clients send instead of keys, for usage and for the audit log."""

import time
from datetime import date
from functools import partial
from typing import NoReturn

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import AwareDatetime
from starlette.exceptions import HTTPException
from starlette.responses import Response

from skyrl.algorithms.losses import CUSTOM
from skyrl.tinker.database.ledger import billing
from skyrl.tinker.database.ledger.billing import AuditType, Window
from skyrl.tinker.errors import BadKey
from skyrl.tinker.http.probes import engine_trouble
from skyrl.tinker.http.routes.dependencies import CallerDependency, ServiceDependency
from skyrl.tinker.identity.callers import ORGANIZATION
from skyrl.tinker.wire import management_schemas as rest
from skyrl.tinker.wire import schemas

router = APIRouter()


@router.post("/auth/token")
async def auth_token(service: ServiceDependency, _: CallerDependency, request: Request) -> rest.AuthTokenResponse:
    """Exchange a key for a token. The client sends the token instead of the key, and renews it with the key."""
    try:
        return rest.AuthTokenResponse(jwt=service.keys.token_for_key(request.headers.get("x-api-key")))
    except BadKey as error:
        raise HTTPException(401, str(error)) from error


@router.get("/auth/apikey/me")
async def get_api_key(caller: CallerDependency) -> rest.ApiKeyResponse:
    """Facts about the caller's key."""
    details = rest.ApiKeyDetails(
        org_details=rest.OrganizationDetails(name=ORGANIZATION), user_details=rest.UserDetails(email=caller.email)
    )
    return rest.ApiKeyResponse(key_id=caller.key_id, name=caller.display_name, note="", details=details)


@router.delete("/auth/apikey/me", response_model=None)
async def delete_api_key(_: CallerDependency) -> NoReturn:
    """Not supported: keys are an option of the server, and clients cannot change them."""
    raise HTTPException(403, "keys are not deleted here: take it out of the server's --api-keys-file and restart that")


@router.get("/billing/usage/events", response_model=rest.UsageResponse)
async def get_usage(
    service: ServiceDependency, caller: CallerDependency, starting_on: AwareDatetime, ending_before: AwareDatetime
) -> Response:
    """Return the caller's usage in a window of whole hours."""
    job = partial(billing.usage, caller=caller, window=Window.of(starting_on, ending_before), now=time.time())
    return await service.listings.answer(caller, job)


@router.get("/billing/usage/checkpoints/current", response_model=rest.StoredNowResponse)
async def get_stored_now(
    service: ServiceDependency, caller: CallerDependency, project_id: str | None = None
) -> Response:
    """Return the disk space that the caller's checkpoints take."""
    job = partial(billing.stored_now, caller=caller, project_id=project_id, now=time.time())
    return await service.listings.answer(caller, job)


@router.get("/audit", response_model=rest.AuditResponse)
async def get_audit_log(
    service: ServiceDependency, caller: CallerDependency, event_type: AuditType = "all", day: date | None = None
) -> Response:
    """Return the audit log of the caller's checkpoints and sessions for a day in UTC (default: today)."""
    return await service.listings.answer(caller, partial(billing.audit_log, caller=caller, kind=event_type, day=day))


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
