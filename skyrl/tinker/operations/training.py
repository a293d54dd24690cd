"""Passes and optimizer steps."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from sqlmodel import Session

from skyrl.algorithms.checks.requests import check_pass
from skyrl.backends.operations import ForwardBackward, OptimStep
from skyrl.tinker.operations.admission import Accepted, Admission
from skyrl.tinker.operations.operation import operation, refuse_unserved
from skyrl.tinker.wire import codec, schemas
from skyrl.tinker.wire.parsing import Body, Limits, ModelAddress, Parsed, json_parser
from skyrl.tinker.wire.protobuf_scan import MAX_PARTS
from skyrl.types import Datum, OptimStepOutput

ARRAY_BYTES = 400
"""Bytes that an array of a pass takes beside its numbers, with its share of the objects around it."""


def _parse_pass(body: Body, limits: Limits) -> Parsed:
    encoding = body.content_encoding
    request = codec.decode_forward_backward(
        body.data, body.content_type, encoding, limits.max_bytes, limits.max_parts or MAX_PARTS
    )
    address = ModelAddress(model_id=request.model_id, seq_id=request.seq_id)
    if request.error is not None:
        return Parsed(address, None, request.error, is_pass=not request.forward_only)
    arrays = [array for datum in request.data for array in _arrays(datum)]
    held_bytes = sum(array.nbytes + ARRAY_BYTES for array in arrays)
    return Parsed(address, request, is_pass=not request.forward_only, held_bytes=held_bytes)


@operation("forward_backward", _parse_pass, codec.encode_forward_backward, max_body_bytes=None, changes_model=True)
async def forward_backward(admission: Admission, request: codec.PassRequest) -> Accepted:
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
    data = await admission.service.decode_pool.run(admission.target.tenant, size, check)
    operation = ForwardBackward(
        request_id=admission.request_id,
        model_id=request.model_id,
        data=data,
        loss_fn=request.loss_fn,
        loss_fn_config={key: float(value) for key, value in request.loss_fn_config.items()},
        forward_only=request.forward_only,
    )
    admission.decided.forward_only = request.forward_only
    return Accepted(operation)


@operation("forward", _parse_pass, codec.encode_forward_backward, max_body_bytes=None)
async def forward(admission: Admission, request: codec.PassRequest) -> Accepted:
    """Compute a loss without gradients (older clients)."""
    return await forward_backward(admission, replace(request, forward_only=True))


def _arrays(datum: Datum) -> list[np.ndarray]:
    return [datum.tokens, *datum.loss_fn_inputs.values()]


@operation("optim_step", json_parser(schemas.OptimStepRequest, ModelAddress), changes_model=True)
async def optim_step(admission: Admission, request: schemas.OptimStepRequest) -> Accepted:
    """Apply the accumulated gradients and clear them."""
    refuse_unserved(request)

    def record(_: Session, result: OptimStepOutput) -> tuple[dict[str, Any], None]:
        return {"metrics": result.metrics, "type": "optim_step"}, None

    operation = OptimStep(request_id=admission.request_id, model_id=request.model_id, adam_params=request.adam_params)
    return Accepted(operation, record=record)
