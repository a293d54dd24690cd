"""Facts about models and their checkpoints."""

from typing import Annotated

from fastapi import APIRouter

from skyrl.errors import UnknownName
from skyrl.tinker.http.routes.dependencies import CallerDependency, ServiceDependency, json_body
from skyrl.tinker.identity.ids import TinkerPath
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
