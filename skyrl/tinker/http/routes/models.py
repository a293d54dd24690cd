"""Facts about models and their checkpoints."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter
from starlette.responses import Response

from skyrl.errors import UnknownName
from skyrl.tinker.database.queries import listings
from skyrl.tinker.http.routes.dependencies import CallerDependency, Limit, Offset, ServiceDependency, json_body
from skyrl.tinker.identity.ids import TinkerPath
from skyrl.tinker.wire import management_schemas as rest
from skyrl.tinker.wire import schemas
from skyrl.types import LoraConfig

router = APIRouter()


@router.post("/get_info", response_model_exclude_none=True)
async def get_info(
    service: ServiceDependency,
    caller: CallerDependency,
    request: Annotated[schemas.GetInfoRequest, json_body(schemas.GetInfoRequest)],
) -> schemas.GetInfoResponse:
    """Facts about a model. The client reads the tokenizer from the folder named in the response, on its own machine."""
    info = await service.wait_until_ready()
    row = await service.directory.model(request.model_id, caller)
    if row.status in ("creating", "failed"):
        raise UnknownName(f"model_id={request.model_id} has not been created (its creation is {row.status}); await it")
    data = schemas.ModelData(arch=info.architecture, model_name=row.base_model, tokenizer_id=info.tokenizer_path)
    config = LoraConfig(**row.lora_config)
    return schemas.GetInfoResponse(
        model_id=row.model_id,
        model_data=data,
        optimizer_config=schemas.OptimizerConfig.of(config.optimizer),
        model_name=row.base_model,
        is_lora=config.rank > 0,
        lora_rank=config.rank,
    )


@router.post("/weights_info", response_model_exclude_none=True)
async def weights_info(
    service: ServiceDependency,
    caller: CallerDependency,
    request: Annotated[schemas.WeightsInfoRequest, json_body(schemas.WeightsInfoRequest)],
) -> schemas.WeightsInfoResponse:
    """Options that a checkpoint was trained with."""
    path = TinkerPath.parse("tinker_path", request.tinker_path)
    row = await service.directory.checkpoint("tinker_path", path, caller)
    config = LoraConfig(**row.lora_config)
    return schemas.WeightsInfoResponse(
        base_model=row.base_model,
        is_lora=config.rank > 0,
        lora_rank=config.rank,
        train_unembed=config.train_unembed,
        train_mlp=config.train_mlp,
        train_attn=config.train_attn,
        optimizer_config=schemas.OptimizerConfig.of(config.optimizer),
    )


@router.get("/training_runs", response_model=rest.TrainingRunsResponse)
async def list_training_runs(
    service: ServiceDependency,
    caller: CallerDependency,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: listings.Scope = "owned",
    project_id: str | None = None,
) -> Response:
    """Runs, newest first."""
    page = partial(
        listings.training_runs, caller=caller, scope=access_scope, project_id=project_id, limit=limit, offset=offset
    )
    return await service.listings.answer(caller, page)


@router.get("/training_runs/{run_id}", response_model_exclude_none=True)
async def get_training_run(
    run_id: str, service: ServiceDependency, caller: CallerDependency, access_scope: listings.Scope = "owned"
) -> rest.TrainingRun:
    """Facts about a run, and its newest checkpoints."""
    return await service.database.read(partial(listings.training_run, caller=caller, scope=access_scope, run_id=run_id))


@router.get("/training_runs/{run_id}/checkpoints", response_model=rest.CheckpointsListResponse)
async def list_checkpoints_of_run(run_id: str, service: ServiceDependency, caller: CallerDependency) -> Response:
    """Checkpoints of a run, newest first. For another tenant's run, only the public ones."""
    return await service.listings.answer(caller, partial(listings.checkpoints_of_run, caller=caller, run_id=run_id))
