"""Copies of checkpoints."""

from typing import Annotated

from fastapi import APIRouter, Header

from skyrl.tinker.http.routes.dependencies import CallerDependency, ServiceDependency, json_body
from skyrl.tinker.operations.copy_weights import copy_checkpoint
from skyrl.tinker.wire import management_schemas as rest

router = APIRouter()


@router.post("/copy_weights")
async def copy_weights(
    service: ServiceDependency,
    caller: CallerDependency,
    request: Annotated[rest.CopyWeightsRequest, json_body(rest.CopyWeightsRequest)],
    x_idempotency_key: Annotated[str | None, Header()] = None,
    x_tinker_weights_access_token: Annotated[str | None, Header()] = None,
) -> rest.CopyWeightsResponse:
    """Copy a checkpoint that the caller (or whoever the access token belongs to) may read into a run of its own."""
    token = x_tinker_weights_access_token or request.weights_access_token
    request = request.model_copy(update={"weights_access_token": token})
    return rest.CopyWeightsResponse(tinker_path=str(await copy_checkpoint(service, caller, request, x_idempotency_key)))
