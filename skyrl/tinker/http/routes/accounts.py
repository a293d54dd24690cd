"""Routes for keys, for tokens that clients send instead of keys, for usage and for the audit log."""

import time
from datetime import date
from functools import partial
from typing import NoReturn

from fastapi import APIRouter, Request
from pydantic import AwareDatetime
from starlette.exceptions import HTTPException
from starlette.responses import Response

from skyrl.tinker.database.ledger import billing
from skyrl.tinker.database.ledger.billing import AuditType, Window
from skyrl.tinker.errors import BadKey
from skyrl.tinker.http.routes.dependencies import CallerDependency, ServiceDependency
from skyrl.tinker.identity.callers import ORGANIZATION
from skyrl.tinker.wire import management_schemas as rest

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
