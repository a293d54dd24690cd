"""The queued operations of the API: each a request schema, its acceptance, and what becomes of its result.

An `accept` function turns a request into work for the engine (`skyrl.backends.operations`), or raises `RequestError`,
which fails the request in its place in the model's order. It also says what the request means to the database: when it
is logged (`on_log`) and when its result is stored (`record`, which returns the JSON that the client reads). What it
chooses goes into `Admission.decided`, because after a crash the request is accepted again and must mean the same.

Routes, parsing, the log and the engine read this table: to add an operation, add a function here.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from pydantic import ValidationError
from sqlmodel import Session

from skyrl.algorithms.checks import check_pass, check_sample
from skyrl.algorithms.score_checks import check_scores
from skyrl.backends.operations import (
    CreateModel,
    DeleteModel,
    ForwardBackward,
    LoadCheckpoint,
    OptimStep,
    Publish,
    Sample,
    SaveCheckpoint,
)
from skyrl.errors import RequestError
from skyrl.tinker import external, ids, json_numbers, schemas, wire
from skyrl.tinker.admission import Accepted, Admission, Obsolete
from skyrl.tinker.checkpoints import SAVED_TO, SavedAs, refuse_taken_name, store_checkpoint, training_checkpoint
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.ids import TinkerPath
from skyrl.tinker.parsing import (
    Address,
    Body,
    Limits,
    ModelAddress,
    NewModelAddress,
    Parsed,
    SamplerAddress,
    WholeModelAddress,
    describe_faults,
    json_object,
    json_parser,
    read_address,
)
from skyrl.tinker.surplus import limit_that_removed
from skyrl.tinker.tables import ModelRow, SamplerRow, VersionRow
from skyrl.tinker.wire_scan import MAX_PARTS
from skyrl.types import Cells, Datum, LoraConfig, ModelOutput, OptimStepOutput, SaveOutput

Parse = Callable[[Body, Limits], Parsed]
Accept = Callable[[Admission, Any], Awaitable[Accepted]]
Encode = Callable[[Any], bytes]

SMALL_BODY = 2**20
LARGE_PROMPTS = 64 * 2**20
ARRAY_BYTES = 400
"""What an array of a pass takes beside its numbers, with its share of the objects around it."""

# What `Admission.decided` holds, among others:
FORWARD_ONLY = "forward_only"
"""Whether a pass leaves its model as it was."""
FOLDER = "folder"
"""Of the checkpoint that a path stood for, or of a version without a name."""
VERSION = "version"
"""A version without a name, which goes on being written after its request is done."""


@dataclass(frozen=True)
class QueuedOperation:
    """What the server knows of an operation."""

    name: str
    """Its path under /api/v1, and its kind in the log."""
    parse: Parse
    """From a body to its request. Raises `MalformedBody`."""
    accept: Accept
    encode: Encode | None
    """Its result as protobuf. None: `record` returns it as JSON."""
    max_body_bytes: int | None
    """None: as the configuration says."""
    changes_model: bool
    """Whether a model has to do it again to become what it was after it."""


OPERATIONS: dict[str, QueuedOperation] = {}


def operation(
    name: str,
    parse: Parse,
    encode: Encode | None = None,
    max_body_bytes: int | None = SMALL_BODY,
    changes_model: bool = False,
) -> Callable[[Accept], Accept]:
    """Put the decorated `accept` function into the table."""

    def register(accept: Accept) -> Accept:
        OPERATIONS[name] = QueuedOperation(name, parse, accept, encode, max_body_bytes, changes_model)
        return accept

    return register


def _load_address(value: dict[str, Any]) -> type[Address]:
    return ModelAddress if value.get("model_id") is not None else NewModelAddress


def _parse_pass(body: Body, limits: Limits) -> Parsed:
    encoding = body.content_encoding
    request = wire.decode_forward_backward(
        body.data, body.content_type, encoding, limits.max_bytes, limits.max_parts or MAX_PARTS
    )
    address = ModelAddress(model_id=request.model_id, seq_id=request.seq_id)
    if request.error is not None:
        return Parsed(address, None, request.error, is_pass=not request.forward_only)
    arrays = [array for datum in request.data for array in _arrays(datum)]
    held_bytes = sum(array.nbytes + ARRAY_BYTES for array in arrays)
    return Parsed(address, request, is_pass=not request.forward_only, held_bytes=held_bytes)


# -- models -----------------------------------------------------------------------------------------------------------


@operation("create_model", json_parser(schemas.CreateModelRequest, NewModelAddress), changes_model=True)
async def create_model(admission: Admission, request: schemas.CreateModelRequest) -> Accepted:
    """Make a model with fresh weights."""
    _refuse_unserved(request)
    info = admission.service.info
    if not admission.again:
        admission.service.check_base_model(request.base_model)
    config = request.lora_config
    if config.rank > info.max_lora_rank:
        raise RequestError(
            f"lora_config.rank={config.rank} is above the largest rank served here; use at most {info.max_lora_rank}, "
            "or start the server with a larger max_lora_rank"
        )
    if config.seed is None:
        config = config.model_copy(update={"seed": admission.decided.setdefault("seed", ids.new_seed())})
    model_id = admission.target.model_id
    operation = CreateModel(request_id=admission.request_id, model_id=model_id, lora_config=config)
    return _creation(
        admission, operation, config, request.user_metadata, {"model_id": model_id, "type": "create_model"}
    )


@operation("load_weights", json_parser(schemas.LoadWeightsRequest, _load_address), changes_model=True)
async def load_weights(admission: Admission, request: schemas.LoadWeightsRequest) -> Accepted:
    """Put a training checkpoint into a model, or make a model of it."""
    _refuse_unserved(request)
    service, target = admission.service, admission.target
    path = TinkerPath.parse("path", request.path)
    checkpoint = admission.decided
    if FOLDER not in checkpoint:
        row = await training_checkpoint(service, path, admission.caller, request.weights_access_token)
        checkpoint |= {FOLDER: row.folder, "digest": row.digest, "lora_config": row.lora_config}
    if request.base_model is not None and not admission.again:
        service.check_base_model(request.base_model)
    lora_config = LoraConfig(**checkpoint["lora_config"])
    operation = LoadCheckpoint(
        request_id=admission.request_id,
        model_id=target.model_id,
        path=service.path_of(checkpoint[FOLDER]),
        load_optimizer=request.optimizer,
        digest=checkpoint["digest"],
    )
    payload = {"path": str(path), "model_id": target.model_id, "type": "load_weights"}
    if target.creates:
        return _creation(admission, operation, lora_config, request.user_metadata or {}, payload)
    loaded = LoraConfig(**admission.model.lora_config)
    # SDK 0.7 resumes by creating a model, of which it knows the rank but not the modules, and loading into that.
    modules = MODULES if target.seq_id == 1 else set()
    _refuse_other_adapter(path, lora_config, loaded, besides=modules)
    adopted = loaded.model_copy(update={name: getattr(lora_config, name) for name in modules})

    def record(session: Session, _: ModelOutput) -> tuple[dict[str, Any], None]:
        _model_row(session, target.model_id).lora_config = adopted.model_dump()
        return payload, None

    return Accepted(operation, record=record, changes=(target.model_id,))


MODULES = {"train_attn", "train_mlp", "train_unembed"}


def _refuse_other_adapter(path: TinkerPath, stored: LoraConfig, loaded: LoraConfig, besides: set[str]) -> None:
    """Raise `RequestError` unless both adapters have one shape, `besides` these fields; their seeds do not matter."""
    for name in LoraConfig.model_fields:
        if name not in {"seed", *besides} and getattr(stored, name) != getattr(loaded, name):
            raise RequestError(
                f"path={path}: the checkpoint has {name}={getattr(stored, name)}, the model {getattr(loaded, name)}; "
                "make a new model of the checkpoint instead (create_training_client_from_state)"
            )


@operation("unload_model", json_parser(schemas.UnloadModelRequest, WholeModelAddress), changes_model=True)
async def unload_model(admission: Admission, request: schemas.UnloadModelRequest) -> Accepted:
    """Free a model's training state, after all that has arrived for it."""
    model_id = request.model_id

    def close(session: Session) -> None:
        _model_row(session, model_id).status = "unloaded"

    def record(_: Session, __: ModelOutput) -> tuple[dict[str, Any], None]:
        return {"model_id": model_id, "type": "unload_model"}, None

    operation = DeleteModel(request_id=admission.request_id, model_id=model_id)
    return Accepted(operation, on_log=close, record=record, changes=(model_id,))


def _creation(
    admission: Admission,
    operation: CreateModel | LoadCheckpoint,
    lora_config: LoraConfig,
    user_metadata: dict[str, Any],
    payload: dict[str, Any],
) -> Accepted:
    """An operation after which there is a model that was not there before."""
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


# -- training ---------------------------------------------------------------------------------------------------------


@operation("forward_backward", _parse_pass, wire.encode_forward_backward, max_body_bytes=None, changes_model=True)
async def forward_backward(admission: Admission, request: wire.PassRequest) -> Accepted:
    """Add the gradients of a loss, or (`forward_only`) just compute it."""
    info = admission.service.info
    check = partial(
        check_pass,
        request.data,
        request.loss_fn,
        request.loss_fn_config,
        vocab_size=info.vocab_size,
        max_context_length=info.max_context_length,
    )
    size = sum(values.nbytes for datum in request.data for values in _arrays(datum))
    data = await admission.service.bodies.work(admission.target.tenant, size, check)
    operation = ForwardBackward(
        request_id=admission.request_id,
        model_id=request.model_id,
        data=data,
        loss_fn=request.loss_fn,
        loss_fn_config={key: float(value) for key, value in request.loss_fn_config.items()},
        forward_only=request.forward_only,
    )
    admission.decided[FORWARD_ONLY] = request.forward_only
    return Accepted(operation)


@operation("forward", _parse_pass, wire.encode_forward_backward, max_body_bytes=None)
async def forward(admission: Admission, request: wire.PassRequest) -> Accepted:
    """Compute a loss without gradients (older clients)."""
    return await forward_backward(admission, replace(request, forward_only=True))


def _arrays(datum: Datum) -> list[np.ndarray]:
    return [datum.tokens, *datum.loss_fn_inputs.values()]


@operation("optim_step", json_parser(schemas.OptimStepRequest, ModelAddress), changes_model=True)
async def optim_step(admission: Admission, request: schemas.OptimStepRequest) -> Accepted:
    """Apply the accumulated gradients and clear them."""
    _refuse_unserved(request)

    def record(_: Session, result: OptimStepOutput) -> tuple[dict[str, Any], None]:
        return {"metrics": result.metrics, "type": "optim_step"}, None

    operation = OptimStep(request_id=admission.request_id, model_id=request.model_id, adam_params=request.adam_params)
    return Accepted(operation, record=record)


# -- checkpoints ------------------------------------------------------------------------------------------------------


@operation("save_weights", json_parser(schemas.SaveWeightsRequest, ModelAddress))
async def save_weights(admission: Admission, request: schemas.SaveWeightsRequest) -> Accepted:
    """Write a named training checkpoint."""
    saved = SavedAs(
        admission.model,
        "weights",
        request.path,
        request.seq_id,
        request.overwrite,
        request.user_metadata,
        request.ttl_seconds,
    )
    path = await _path_of_save(admission, saved)
    operation = SaveCheckpoint(request_id=admission.request_id, model_id=request.model_id, path=path)

    def record(session: Session, result: SaveOutput) -> tuple[dict[str, Any], Obsolete | None]:
        obsolete = store_checkpoint(session, saved, result)
        return {"path": str(saved.path), "type": "save_weights"}, obsolete

    return Accepted(operation, record=record)


@operation("save_weights_for_sampler", json_parser(schemas.SaveWeightsForSamplerRequest, ModelAddress))
async def save_weights_for_sampler(admission: Admission, request: schemas.SaveWeightsForSamplerRequest) -> Accepted:
    """Freeze the current weights as a version: under a name, or as a new sampler."""
    if request.path is None:
        if not admission.again:
            await admission.service.disk.make_room(request.model_id, sampler=True)
        return _publish_sampler(admission, request)
    if request.kind == "inflight":
        raise RequestError("kind=inflight names a sampler's weights, not a checkpoint's; leave out kind, or path")
    saved = SavedAs(
        admission.model,
        "sampler_weights",
        request.path,
        request.seq_id,
        overwrite=False,
        user_metadata=request.user_metadata,
        ttl_seconds=request.ttl_seconds,
    )
    path = await _path_of_save(admission, saved)
    operation = Publish(request_id=admission.request_id, model_id=request.model_id, version=saved.version, path=path)

    def record(session: Session, result: SaveOutput) -> tuple[dict[str, Any], Obsolete | None]:
        obsolete = store_checkpoint(session, saved, result)
        return {"path": str(saved.path), "type": "save_weights_for_sampler"}, obsolete

    return Accepted(operation, record=record)


async def _path_of_save(admission: Admission, saved: SavedAs) -> str:
    """Where a named checkpoint goes. Raises `RequestError` if there is one of its name already, or no room for it."""
    if not admission.again:
        await refuse_taken_name(admission.service.database, saved)
        await admission.service.disk.make_room(saved.model.model_id, sampler=saved.kind != "weights")
    return admission.service.path_of(admission.decided.setdefault(SAVED_TO, saved.folder))


@operation("save_weights_external", json_parser(schemas.SaveWeightsExternalRequest, ModelAddress))
async def save_weights_external(admission: Admission, request: schemas.SaveWeightsExternalRequest) -> Accepted:
    """Write the current weights for use elsewhere, encrypted if there are recipients."""
    saved = SavedAs(
        admission.model,
        "external_weights",
        request.path,
        request.seq_id,
        overwrite=False,
        user_metadata=None,
        ttl_seconds=request.ttl_seconds,
    )
    recipients = request.age_encryption_recipients
    keys = None if recipients is None else external.read_recipients(recipients)
    path = await _path_of_save(admission, saved)
    operation = Publish(request_id=admission.request_id, model_id=request.model_id, version=saved.version, path=path)

    async def encrypt(_: SaveOutput) -> SaveOutput:
        return SaveOutput(path, *await asyncio.to_thread(external.encrypt_folder, path, keys or ()))

    def record(session: Session, result: SaveOutput) -> tuple[dict[str, Any], Obsolete | None]:
        obsolete = store_checkpoint(session, saved, result)
        payload = {"path": str(saved.path), "size_bytes": result.size_bytes, "type": "save_weights_external"}
        return payload, obsolete

    return Accepted(operation, complete=encrypt if keys else None, record=record)


def _publish_sampler(admission: Admission, request: schemas.SaveWeightsForSamplerRequest) -> Accepted:
    """A new sampler of the current weights. All inflight samplers of a model move on to its newest inflight version."""
    for field in ("user_metadata", "ttl_seconds"):
        if getattr(request, field):
            raise RequestError(f"{field} belongs to named checkpoints; leave it out, or give the checkpoint a path")
    model, inflight = admission.model, request.kind == "inflight"
    assert request.sampling_session_seq_id is not None
    sampler_id = ids.sampler_id(model.session_id, request.sampling_session_seq_id)
    version = ids.version_id(model.model_id, request.seq_id)
    folder = admission.decided.setdefault(FOLDER, ids.folder(model.model_id, "ephemeral", str(request.seq_id)))
    admission.decided[VERSION] = version
    operation = Publish(
        request_id=admission.request_id,
        model_id=model.model_id,
        version=version,
        path=admission.service.path_of(folder),
        persist=False,
    )

    def record(session: Session, _: SaveOutput) -> tuple[dict[str, Any], None]:
        answer = {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}
        if session.get(SamplerRow, sampler_id) is not None:
            if session.get(VersionRow, version) is not None:
                return answer, None  # by a transaction whose end the database could not tell us
            raise RequestError(
                f"sampling_session_seq_id={request.sampling_session_seq_id} is in use in this session; use the next one"
            )
        sampler = SamplerRow(
            sampler_id=sampler_id,
            session_id=model.session_id,
            tenant=model.tenant,
            kind=request.kind,
            base_model=model.base_model,
            model_id=model.model_id,
        )
        unwritten = VersionRow(
            version=version,
            model_id=model.model_id,
            session_id=model.session_id,
            tenant=model.tenant,
            folder=folder,
        )
        session.add(unwritten)
        if inflight:
            row = _model_row(session, model.model_id)
            row.inflight_version, row.inflight_folder = version, folder
        else:
            sampler.version, sampler.folder = version, folder
        session.add(sampler)
        return answer, None

    return Accepted(operation, record=record, changes=(model.model_id,))


# -- sampling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleInput:
    """A sample that was read, its tokens as arrays."""

    request: schemas.SampleRequest
    prompt: np.ndarray
    targets: Cells | None


def _parse_sample(body: Body, limits: Limits) -> Parsed:
    value = json_object(body, partial(json_numbers.parse, max_tokens=limits.max_context_length))
    address = read_address(SamplerAddress, value)
    try:
        request = schemas.SampleRequest.model_validate(value)
        targets = request.target_prompt_logprobs
        cells = None if targets is None else wire.target_cells(targets)
        return Parsed(address, SampleInput(request, wire.prompt_tokens(request.prompt), cells))
    except ValidationError as error:
        return Parsed(address, None, describe_faults(error))
    except RequestError as error:
        return Parsed(address, None, str(error))


@operation(ids.SAMPLE, _parse_sample, wire.encode_sample, LARGE_PROMPTS)
async def sample(admission: Admission, given: SampleInput) -> Accepted:
    """Continue a prompt with a sampler's version; an inflight sampler's is the newest one now."""
    request, prompt, cells = given.request, given.prompt, given.targets
    _refuse_unserved(request)
    service, sampler = admission.service, admission.sampler
    version, folder = sampler.version, sampler.folder
    if sampler.kind == "inflight":
        assert sampler.model_id is not None
        model = await service.directory.model(sampler.model_id, admission.caller)
        version, folder = model.inflight_version, model.inflight_folder
    if sampler.kind != "base" and version is None:
        raise RequestError(_gone(sampler, service.config))
    service.version_use.begin(admission.request_id, version, folder and service.path_of(folder))
    if sampler.base_model != service.info.base_model:
        raise RequestError(
            f"sampling_session_id={sampler.sampler_id} samples from base model {sampler.base_model!r}, which is not "
            f"the one served now ({service.info.base_model!r}); start the server with --base-model {sampler.base_model}"
        )
    params = request.sampling_params
    max_tokens = check_sample(
        prompt,
        params,
        request.num_samples,
        request.topk_prompt_logprobs,
        vocab_size=service.info.vocab_size,
        max_context_length=service.info.max_context_length,
    )
    check_scores(
        len(prompt),
        request.num_samples,
        max_tokens,
        topk_sample_logprobs=request.topk_sample_logprobs,
        prompt_logprobs=request.prompt_logprobs,
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        target_prompt_logprobs=cells,
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        vocab_size=service.info.vocab_size,
    )
    seed = ids.new_seed() if params.seed is None else params.seed
    operation = Sample(
        request_id=admission.request_id,
        version=version,
        path=None if folder is None else service.path_of(folder),
        prompt=prompt,
        params=params.model_copy(update={"max_tokens": max_tokens, "seed": seed}),
        num_samples=request.num_samples,
        prompt_logprobs=request.prompt_logprobs,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        target_prompt_logprobs=cells,
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
    )
    return Accepted(operation)


def _gone(sampler: SamplerRow, config: EngineConfig) -> str:
    """Why a sampler has no weights any more."""
    field = f"sampling_session_id={sampler.sampler_id}"
    if sampler.kind == "checkpoint":
        return f"{field}: its checkpoint {sampler.model_path} was deleted or has expired; make a sampler of another one"
    if (limit := limit_that_removed(sampler, config)) is not None:
        return f"{field}: {limit}"
    return (
        f"{field}: its weights are gone; those without a name are kept for {config.ephemeral_grace_sec} seconds after "
        "their session was finished, or has been silent for a day. Give save_weights_for_sampler a name (path) to keep "
        "them"
    )


def _refuse_unserved(request: schemas.RequestModel) -> None:
    if (error := request.unserved()) is not None:
        raise RequestError(error)
