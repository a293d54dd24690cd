"""The training operations: passes and optimizer steps."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from sqlmodel import Session

from skyrl.algorithms.checks.objectives import NEEDING, only_sampled
from skyrl.algorithms.checks.requests import check_pass
from skyrl.algorithms.checks.traced import check_traced_data
from skyrl.algorithms.losses import CUSTOM, LOSSES
from skyrl.algorithms.traced.objective import TracedObjective, traced_objective
from skyrl.backends.operations import ForwardBackward, OptimStep
from skyrl.errors import RequestError
from skyrl.tinker.errors import BodyTooLarge
from skyrl.tinker.operations.admission import Accepted, Admission
from skyrl.tinker.operations.operation import operation
from skyrl.tinker.wire import codec, schemas
from skyrl.tinker.wire.oversized_pass import failed_pass
from skyrl.tinker.wire.parsing import Body, Limits, ModelAddress, Parsed, json_parser
from skyrl.tinker.wire.protobuf import MAX_PARTS
from skyrl.tinker.wire.sharing import LARGE_BYTES
from skyrl.types import Datum, ForwardBackwardOutput, LoraConfig, OptimStepOutput

ARRAY_BYTES = 400
"""Bytes of memory that each array of a pass takes in addition to its numbers, for the array object and a share of the
objects that contain it."""


ESTIMATOR = "skyrl.ai/stable_reinforce_estimator:max"
"""Metric in results of `stable_reinforce`. Its value is the version of our estimator, which differs from the hosted
service's estimator."""
PLAINEST = "importance_sampling"
"""Loss that an error recommends before others with the same inputs."""


def _parse_pass(body: Body, limits: Limits) -> Parsed:
    try:
        if body.too_large:
            raise BodyTooLarge(body.too_large)
        request = codec.decode_forward_backward(
            body.data, body.content_type, body.content_encoding, limits.max_bytes, limits.max_parts or MAX_PARTS
        )
    except BodyTooLarge as error:
        return failed_pass(body, error)
    address = ModelAddress(model_id=request.model_id, seq_id=request.seq_id)
    if request.error is not None:
        return Parsed(address, None, request.error, is_pass=not request.forward_only)
    arrays = [array for datum in request.data for array in _arrays(datum)]
    held_bytes = sum(array.nbytes + ARRAY_BYTES for array in arrays)
    return Parsed(address, request, is_pass=not request.forward_only, held_bytes=held_bytes)


@operation("forward_backward", _parse_pass, codec.encode_forward_backward, max_body_bytes=None, changes_model=True)
async def forward_backward(admission: Admission, request: codec.PassRequest) -> Accepted:
    """Compute a loss and, unless `forward_only`, add its gradients to the model's gradients."""
    info = admission.service.info
    if not admission.again:
        refuse_by_operator(admission.service.config.refused_losses, request.loss_fn)
    specification = await _specification(admission, request.loss_fn_config) if request.loss_fn == CUSTOM else None
    check = partial(_checked, request, specification, info.vocab_size, info.max_context_length, admission.again)
    size = sum(values.nbytes for datum in request.data for values in _arrays(datum))
    size = size if specification is None else max(size, LARGE_BYTES + 1)
    data, objective = await admission.service.decode_pool.run(admission.target.tenant, size, check)
    operation = ForwardBackward(
        request_id=admission.request_id,
        model_id=request.model_id,
        data=data,
        loss_fn=request.loss_fn if objective is None else objective,
        loss_fn_config={} if objective else {key: float(value) for key, value in request.loss_fn_config.items()},
        forward_only=request.forward_only,
    )
    admission.decided.forward_only = request.forward_only
    return Accepted(operation, complete=_tell_estimator if request.loss_fn == "stable_reinforce" else None)


def refuse_by_operator(refused: Collection[str], loss_fn: str) -> None:
    """Raise `RequestError` if the operator's list `refused` contains a loss. The error names losses that are served."""
    if loss_fn not in refused:
        return
    served = [name for name in LOSSES if name not in refused]
    needs = LOSSES[loss_fn].needs if loss_fn in LOSSES else ()
    alike = [name for name in served if needs and LOSSES[name].needs == needs]
    way_out = f"use another loss_fn: {', '.join(served) or 'none is served'}"
    if alike:
        nearest = PLAINEST if PLAINEST in alike else alike[0]
        way_out = f"use loss_fn={nearest!r}, which reads the same inputs"
    raise RequestError(f"loss_fn={loss_fn!r} is refused by this server's operator; {way_out}")


async def _specification(admission: Admission, config: Mapping[str, object]) -> str:
    """Return the normalized graph of the traced loss that a pass names.

    Raises RequestError if `config` contains anything except `loss_id`, or if the loss and the model belong to different
    sessions.
    """
    loss_id, field = config.get("loss_id"), "loss_fn_config['loss_id']"
    if not isinstance(loss_id, str) or len(config) > 1:
        raise RequestError(f"loss_fn_config={sorted(config)}: loss_fn='custom' takes loss_id, a text, and nothing else")
    row = await admission.service.directory.custom_loss(field, loss_id, admission.caller)
    if row.session_id != admission.target.session.session_id:
        raise RequestError(f"{field}={loss_id!r} was made in another session; make it with this one's ServiceClient")
    return row.specification


def _checked(
    request: codec.PassRequest, specification: str | None, vocab_size: int, max_context_length: int, again: bool
) -> tuple[list[Datum], TracedObjective | None]:
    if specification is not None:
        objective = traced_objective(specification)
        data = check_traced_data(
            request.data,
            objective,
            vocab_size=vocab_size,
            max_context_length=max_context_length,
            refuse_unread=not again,
        )
        return data, objective
    data = check_pass(
        request.data,
        request.loss_fn,
        request.loss_fn_config,
        vocab_size=vocab_size,
        max_context_length=max_context_length,
    )
    if request.loss_fn in NEEDING:
        data = only_sampled(data, [datum.sampled for datum in request.data], request.loss_fn)
    return data, None


async def _tell_estimator(output: ForwardBackwardOutput) -> ForwardBackwardOutput:
    return replace(output, metrics={**output.metrics, ESTIMATOR: 1.0})


@operation("forward", _parse_pass, codec.encode_forward_backward, max_body_bytes=None)
async def forward(admission: Admission, request: codec.PassRequest) -> Accepted:
    """Compute a loss without gradients (older clients)."""
    return await forward_backward(admission, replace(request, forward_only=True))


def _arrays(datum: Datum) -> list[np.ndarray]:
    return [datum.tokens, *datum.loss_fn_inputs.values()]


@operation("optim_step", json_parser(schemas.OptimStepRequest, ModelAddress), changes_model=True)
async def optim_step(admission: Admission, request: schemas.OptimStepRequest) -> Accepted:
    """Apply the accumulated gradients and clear them."""

    def record(_: Session, result: OptimStepOutput) -> tuple[dict[str, Any], None]:
        return {"metrics": result.metrics, "type": "optim_step"}, None

    family, params = LoraConfig(**admission.model.lora_config).optimizer, request.optimizer_params
    if (family == "dimuon") != (params is not None):
        given = "adam_params" if params is None else "optimizer_params of type dimuon"
        raise RequestError(
            f"{given}: model_id={request.model_id} was created with optimizer_config {family}; send "
            f"{'DimuonParams' if family == 'dimuon' else 'AdamParams'} with each step"
        )
    operation = OptimStep(
        request_id=admission.request_id,
        model_id=request.model_id,
        adam_params=request.adam_params,
        dimuon_params=params,
    )
    return Accepted(operation, record=record)
