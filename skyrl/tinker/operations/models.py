"""Operations on models: create, load, unload."""

from typing import Any

from sqlmodel import Session

from skyrl.backends.operations import CreateModel, DeleteModel, LoadCheckpoint
from skyrl.errors import RequestError
from skyrl.tinker.database.tables import ModelRow
from skyrl.tinker.identity import ids
from skyrl.tinker.identity.ids import TinkerPath
from skyrl.tinker.operations.admission import Accepted, Admission
from skyrl.tinker.operations.checkpoint_access import training_checkpoint
from skyrl.tinker.operations.operation import operation
from skyrl.tinker.wire import schemas
from skyrl.tinker.wire.parsing import Address, ModelAddress, NewModelAddress, WholeModelAddress, json_parser
from skyrl.types import BackendInfo, LoraConfig, ModelOutput


def _load_address(value: dict[str, Any]) -> type[Address]:
    return ModelAddress if value.get("model_id") is not None else NewModelAddress


@operation("create_model", json_parser(schemas.CreateModelRequest, NewModelAddress), changes_model=True)
async def create_model(admission: Admission, request: schemas.CreateModelRequest) -> Accepted:
    """Create a model with fresh weights."""
    info = admission.service.info
    if not admission.again:
        admission.service.check_base_model(request.base_model)
    config = request.lora_config
    check_rank(config, info)
    config = config.model_copy(update={"optimizer": request.optimizer_config.type})
    if config.optimizer == "dimuon" and config.rank == 0:
        raise RequestError(
            "optimizer_config.type='dimuon' is for adapters, whose matrices it orthogonalizes; use adamw for rank 0"
        )
    if config.seed is None:
        if admission.decided.seed is None:
            admission.decided.seed = ids.new_seed()
        config = config.model_copy(update={"seed": admission.decided.seed})
    model_id = admission.target.model_id
    operation = CreateModel(request_id=admission.request_id, model_id=model_id, lora_config=config)
    return _creation(
        admission, operation, config, request.user_metadata, {"model_id": model_id, "type": "create_model"}
    )


@operation("load_weights", json_parser(schemas.LoadWeightsRequest, _load_address), changes_model=True)
async def load_weights(admission: Admission, request: schemas.LoadWeightsRequest) -> Accepted:
    """Load a training checkpoint into an existing or a new model."""
    service, target = admission.service, admission.target
    path = TinkerPath.parse("path", request.path)
    decided = admission.decided
    if decided.folder is None:
        row = await training_checkpoint(service, path, admission.caller, request.weights_access_token)
        decided.folder, decided.digest, decided.lora_config = row.folder, row.digest, row.lora_config
    if request.base_model is not None and not admission.again:
        service.check_base_model(request.base_model)
    assert decided.folder is not None and decided.lora_config is not None, "chosen together"
    lora_config = LoraConfig(**decided.lora_config)
    operation = LoadCheckpoint(
        request_id=admission.request_id,
        model_id=target.model_id,
        path=service.path_of(decided.folder),
        load_optimizer=request.optimizer,
        digest=decided.digest,
    )
    payload = {"path": str(path), "model_id": target.model_id, "type": "load_weights"}
    if target.creates:
        if not request.optimizer:
            lora_config = lora_config.model_copy(update={"optimizer": request.optimizer_config.type})
        return _creation(admission, operation, lora_config, request.user_metadata or {}, payload)
    loaded = LoraConfig(**admission.model.lora_config)
    # SDK 0.7 resumes by creating a model, of which it knows the rank but not the modules, and loading into that.
    modules = MODULES if target.seq_id == 1 else set()
    besides = modules if request.optimizer else {*modules, "optimizer"}
    _refuse_other_adapter(path, lora_config, loaded, besides)
    adopted = loaded.model_copy(update={name: getattr(lora_config, name) for name in modules})

    def record(session: Session, _: ModelOutput) -> tuple[dict[str, Any], None]:
        _model_row(session, target.model_id).lora_config = adopted.model_dump()
        return payload, None

    return Accepted(operation, record=record, changes=(target.model_id,))


MODULES = {"train_attn", "train_mlp", "train_unembed"}


def _refuse_other_adapter(path: TinkerPath, stored: LoraConfig, loaded: LoraConfig, besides: set[str]) -> None:
    """Raise `RequestError` unless both adapters are equal except for the fields `besides` and the seed."""
    for name in LoraConfig.model_fields:
        if name not in {"seed", *besides} and getattr(stored, name) != getattr(loaded, name):
            raise RequestError(
                f"path={path}: the checkpoint has {name}={getattr(stored, name)}, the model {getattr(loaded, name)}; "
                "make a new model of the checkpoint instead (create_training_client_from_state)"
            )


@operation("unload_model", json_parser(schemas.UnloadModelRequest, WholeModelAddress), changes_model=True)
async def unload_model(admission: Admission, request: schemas.UnloadModelRequest) -> Accepted:
    """Free a model's training state, after all requests that have arrived for it."""
    model_id = request.model_id

    def close(session: Session) -> None:
        _model_row(session, model_id).status = "unloaded"

    def record(_: Session, __: ModelOutput) -> tuple[dict[str, Any], None]:
        return {"model_id": model_id, "type": "unload_model"}, None

    operation = DeleteModel(request_id=admission.request_id, model_id=model_id)
    return Accepted(operation, on_log=close, record=record, changes=(model_id,))


def check_rank(config: LoraConfig, info: BackendInfo) -> None:
    """Raise `RequestError` for an adapter that is too large for this server."""
    if config.rank > info.max_lora_rank:
        raise RequestError(
            f"lora_config.rank={config.rank} is above the largest rank served here; use at most {info.max_lora_rank}, "
            "or start the server with a larger max_lora_rank"
        )


def _creation(
    admission: Admission,
    operation: CreateModel | LoadCheckpoint,
    lora_config: LoraConfig,
    user_metadata: dict[str, Any],
    payload: dict[str, Any],
) -> Accepted:
    """Return an operation that creates a model."""
    target = admission.target
    base_model = admission.service.info.base_model

    def announce(session: Session) -> None:
        row = ModelRow(
            model_id=target.model_id,
            session_id=target.session.session_id,
            tenant=target.tenant,
            base_model=base_model,
            lora_config=lora_config.model_dump(),
            user_metadata=user_metadata,
        )
        session.add(row)

    def record(session: Session, _: ModelOutput) -> tuple[dict[str, Any], None]:
        row = _model_row(session, target.model_id)
        if row.status == "creating":
            row.status = "live"
        return payload, None

    return Accepted(operation, announce, record, changes=(target.model_id,))


def _model_row(session: Session, model_id: str) -> ModelRow:
    row = session.get(ModelRow, model_id)
    assert row is not None, model_id
    return row
