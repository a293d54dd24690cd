"""Samplers of the base model and of checkpoints. (`save_weights_for_sampler` creates samplers of current weights.)"""

from typing import Annotated

from fastapi import APIRouter
from sqlmodel import Session

from skyrl.errors import RequestError, UnknownName
from skyrl.tinker.context import Service
from skyrl.tinker.database.queries.checkpoint_rows import find_checkpoint
from skyrl.tinker.database.tables import SamplerRow
from skyrl.tinker.http.routes.dependencies import CallerDependency, ServiceDependency, json_body
from skyrl.tinker.identity import ids
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import TinkerPath
from skyrl.tinker.wire import schemas

router = APIRouter()


@router.post("/create_sampling_session")
async def create_sampling_session(
    service: ServiceDependency,
    caller: CallerDependency,
    request: Annotated[schemas.CreateSamplingSessionRequest, json_body(schemas.CreateSamplingSessionRequest)],
) -> schemas.CreateSamplingSessionResponse:
    """Create a sampler. Requests with the same session and number refer to the same sampler."""
    info = await service.wait_until_ready()
    owner = await service.directory.session(request.session_id, caller)
    if owner.finished_at is not None:
        raise RequestError(f"session {request.session_id} is finished; start a new ServiceClient")
    if request.base_model is not None:
        service.check_base_model(request.base_model)
    sampler_id = ids.sampler_id(request.session_id, request.sampling_session_seq_id)
    path = None
    if request.model_path is not None:
        path = TinkerPath.parse("model_path", request.model_path)
        await _check_checkpoint(service, path, caller)

    def insert(session: Session) -> bool:
        """Return True if the id is new, or if its sampler has the same source."""
        same = session.get(SamplerRow, sampler_id)
        kind = "base" if path is None else "checkpoint"
        if same is not None:
            return (same.kind, same.model_path) == (kind, request.model_path)
        row = SamplerRow(
            sampler_id=sampler_id,
            session_id=request.session_id,
            tenant=owner.tenant,
            kind=kind,
            base_model=info.base_model,
            model_path=request.model_path,
        )
        if path is not None:
            checkpoint = find_checkpoint(session, path)  # once more, as a save may have replaced it meanwhile
            if checkpoint is None:
                raise UnknownName(f"model_path={path}: there is no such checkpoint any more")
            row.model_id, row.version, row.folder = checkpoint.model_id, checkpoint.version, checkpoint.folder
        session.add(row)
        return True

    if not await service.database.write(insert):
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

    def join(session: Session) -> int:
        row = session.get_one(SamplerRow, sampler.sampler_id)
        row.clients += 1
        return row.clients - 1

    return schemas.JoinSamplingSessionResponse(client_counter=await service.database.write(join))


async def _check_checkpoint(service: Service, path: TinkerPath, caller: Caller) -> None:
    checkpoint = await service.directory.checkpoint("model_path", path, caller)
    if path.kind == "external_weights":
        raise RequestError(
            f"model_path={path} is for use elsewhere; sample from what save_weights_for_sampler made: "
            "tinker://MODEL/sampler_weights/NAME"
        )
    if checkpoint.base_model != service.info.base_model:
        raise RequestError(
            f"model_path={path} was trained on base model {checkpoint.base_model!r}, which is not the one served here "
            f"({service.info.base_model!r}); start the server with --base-model {checkpoint.base_model}"
        )
