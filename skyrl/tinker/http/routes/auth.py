"""Keys, the tokens that stand for them, and what only a hosted service has."""

from typing import NoReturn

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException

from skyrl.tinker.errors import BadKey
from skyrl.tinker.http.routes.dependencies import CallerDependency, ServiceDependency
from skyrl.tinker.identity.callers import ORGANIZATION
from skyrl.tinker.wire import management_schemas as rest

router = APIRouter()


@router.post("/auth/token")
async def auth_token(service: ServiceDependency, _: CallerDependency, request: Request) -> rest.AuthTokenResponse:
    """Exchange a key for a token. The client sends that instead, and renews it with the key."""
    try:
        return rest.AuthTokenResponse(jwt=service.keys.token_for_key(request.headers.get("x-api-key")))
    except BadKey as error:
        raise HTTPException(401, str(error)) from error


@router.get("/auth/apikey/me")
async def get_api_key(caller: CallerDependency) -> rest.ApiKeyResponse:
    """Facts about the key that was sent."""
    details = rest.ApiKeyDetails(
        org_details=rest.OrganizationDetails(name=ORGANIZATION), user_details=rest.UserDetails(email=caller.email)
    )
    return rest.ApiKeyResponse(key_id=caller.key_id, name=caller.name, note="", details=details)


@router.delete("/auth/apikey/me", response_model=None)
async def delete_api_key(_: CallerDependency) -> NoReturn:
    """Keys are an option of the server, which no client may change."""
    raise HTTPException(403, "keys are not deleted here: take it out of the server's --api-keys-file and restart that")


def _not_served(path: str, what: str) -> None:
    async def refuse(_: CallerDependency) -> NoReturn:
        raise HTTPException(404, f"{what} not served by this server")

    router.get(path, name=path, response_model=None)(refuse)


_not_served("/audit", "an audit log is")
_not_served("/billing/usage/events", "billing is")
_not_served("/billing/usage/checkpoints/current", "billing is")
_not_served("/sessions/{session_id}/trace_export", "traces of sessions are")
