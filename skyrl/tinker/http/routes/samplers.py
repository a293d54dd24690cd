"""Samplers of the base model and of checkpoints. (`save_weights_for_sampler` creates samplers of current weights.)"""

from typing import Annotated

from fastapi import APIRouter

from skyrl.errors import RequestError
from skyrl.tinker.http.routes.dependencies import CallerDependency, ServiceDependency, json_body
from skyrl.tinker.identity.ids import TinkerPath
from skyrl.tinker.sampling.samplers import checkpoint_to_sample, join_sampler, make_sampler
from skyrl.tinker.wire import schemas

router = APIRouter()


@router.post("/create_sampling_session")
async def create_sampling_session(
    service: ServiceDependency,
    caller: CallerDependency,
    request: Annotated[schemas.CreateSamplingSessionRequest, json_body(schemas.CreateSamplingSessionRequest)],
) -> schemas.CreateSamplingSessionResponse:
    """Create a sampler. Requests with the same session and number refer to the same sampler."""
    await service.wait_until_ready()
    owner = await service.directory.session(request.session_id, caller)
    if owner.finished_at is not None:
        raise RequestError(f"session {request.session_id} is finished; start a new ServiceClient")
    if request.base_model is not None:
        service.check_base_model(request.base_model)
    path = None
    if request.model_path is not None:
        path = TinkerPath.parse("model_path", request.model_path)
        await checkpoint_to_sample(service, "model_path", path, caller)
    sampler_id = await make_sampler(service, owner, request.sampling_session_seq_id, path)
    if sampler_id is None:
        raise RequestError(
            f"sampling_session_seq_id={request.sampling_session_seq_id} is in use for another sampler of this session; "
            "use the next number"
        )
    return schemas.CreateSamplingSessionResponse(sampling_session_id=sampler_id)


@router.get("/samplers/{sampler_id}", response_model_exclude_none=True)
async def get_sampler(sampler_id: str, service: ServiceDependency, caller: CallerDependency) -> schemas.SamplerResponse:
    """Model of a sampler."""
    row = await service.directory.sampler(sampler_id, caller)
    return schemas.SamplerResponse(sampler_id=row.sampler_id, base_model=row.base_model, model_path=row.model_path)


@router.post("/join_sampling_session")
async def join_sampling_session(
    service: ServiceDependency,
    caller: CallerDependency,
    request: Annotated[schemas.JoinSamplingSessionRequest, json_body(schemas.JoinSamplingSessionRequest)],
) -> schemas.JoinSamplingSessionResponse:
    """Add a client to a sampler and return its unique number."""
    sampler = await service.directory.sampler(request.sampling_session_id, caller)
    return schemas.JoinSamplingSessionResponse(client_counter=await join_sampler(service, sampler.sampler_id))
