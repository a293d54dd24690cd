"""Decoding of training passes and encoding of training results and samples, as protobuf or JSON with NumPy arrays.

There are two kinds of decoding errors. A body without a readable address (model_id, seq_id) raises `MalformedBody`. Any
other fault, such as an image or an invalid tensor, goes to `PassRequest.error`, so that the request can fail at its
position in the model's order. Protobuf paths create no Python object per token. Decoding allocates at most `max_bytes`
for arrays, whatever the body declares.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import groupby
from typing import Any

import numpy as np
import zstandard
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic import ValidationError

from skyrl.algorithms.checks.objectives import NEEDING
from skyrl.errors import RequestError
from skyrl.tinker.errors import BodyTooLarge, MalformedBody
from skyrl.tinker.wire import json_numbers
from skyrl.tinker.wire.pace import Pace
from skyrl.tinker.wire.parsing import Body, ModelAddress, TooLarge, describe_faults, json_object, read_address
from skyrl.tinker.wire.proto import skyrl_tinker_pb2 as pb
from skyrl.tinker.wire.protobuf import MAX_PARTS, Part, address_of, array, check_parts, joined, unknown_field
from skyrl.tinker.wire.protobuf import field as field_of
from skyrl.tinker.wire.schemas import ForwardBackwardRequest, ForwardRequest, ModelInput, PassInput, TensorData
from skyrl.tinker.wire.tensors import Budget, check_dimensions, dense, densified, float32s, from_bytes, int64s, sparse
from skyrl.types import Datum, ForwardBackwardOutput, SampleOutput, TokenMatrix, TokenTable

PROTOBUF = "application/x-protobuf"
"""Media type of protobuf requests and results."""

DTYPES = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
DTYPE_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}

MAX_JSON_BYTES = 64 * 2**20
"""Maximum bytes of a JSON request. JSON takes longer to parse than protobuf."""
ZSTD_PIECE = 1024
"""Maximum compressed bytes per decompression step. A step yields at most 32 MiB, so a zip bomb is detected in time."""
ZSTD_MAKES = 2**20
"""Target bytes of a decompressed piece. Steps adapt to it, because copying a piece holds the interpreter lock."""


@dataclass(frozen=True)
class PassRequest:
    """A decoded forward_backward or forward request, not validated yet. If `error` is set, it has only its address."""

    model_id: str
    seq_id: int
    forward_only: bool
    data: list[Datum] = field(default_factory=list)
    loss_fn: str = ""
    loss_fn_config: dict[str, float | str] = field(default_factory=dict)
    error: str | None = None
    """Decoding error, as a message to the client. None if there was no error."""


# -- requests ---------------------------------------------------------------------------------------------------------


def decode_forward_backward(
    body: bytes, content_type: str, content_encoding: str | None, max_bytes: int, max_parts: int = MAX_PARTS
) -> PassRequest:
    """Decode the body of `forward_backward` (protobuf or JSON) or `forward` (JSON).

    Sparse tensors are converted to dense ones; entries without a value become 0. Raises `MalformedBody` and
    `BodyTooLarge`.

    Args:
        body: Body as received.
        content_type: Media type of the body.
        content_encoding: None, "", "identity" or "zstd".
        max_bytes: Limit of the decompressed body, and of the arrays decoded from it, in bytes.
        max_parts: Maximum number of fields of a protobuf body, in all its messages. If it is above `MAX_PARTS`, the
            limits of JSON bodies do not apply.
    """
    body = decompress(body, content_encoding, max_bytes)
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == PROTOBUF:
        return _from_protobuf(body, max_bytes, max_parts)
    if media_type.endswith("json"):
        return _from_json(body, max_bytes, bounded=max_parts <= MAX_PARTS)
    raise MalformedBody(f"Content-Type: {content_type} is not served; send {PROTOBUF} or application/json")


def decompress(body: bytes, content_encoding: str | None, max_bytes: int) -> bytes:
    """Undo the content encoding of a body. Raises `MalformedBody`, and `BodyTooLarge` for more than `max_bytes`."""
    if content_encoding == "zstd":
        body = _unzstd(body, max_bytes)
    elif content_encoding not in (None, "", "identity"):
        raise MalformedBody(f"Content-Encoding: {content_encoding} is not served; send zstd or none")
    if len(body) > max_bytes:
        raise BodyTooLarge(too_large_pass(max_bytes))
    return body


def prompt_tokens(model_input: ModelInput) -> np.ndarray:
    """Concatenate the chunks of a JSON model input to int32 tokens. Raises `RequestError` for anything but text."""
    parts = []
    for chunk in model_input.chunks:
        if chunk.kind != "encoded_text":
            raise RequestError(_only_text(chunk.kind))
        parts.append(int64s("tokens", [] if chunk.tokens is None else chunk.tokens))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    limits = np.iinfo(np.int32)
    if tokens.size and (tokens.min() < limits.min or tokens.max() > limits.max):
        bad = tokens[np.argmax((tokens < limits.min) | (tokens > limits.max))]
        raise RequestError(f"token id {bad} is in no vocabulary; use the tokenizer of this model")
    return tokens.astype(np.int32)


def target_matrix(tensor: TensorData) -> TokenMatrix:
    """Decode the token ids of `target_prompt_logprobs`. Raises `RequestError`.

    Returns int32 of shape `[prompt tokens - 1, K]`, dense or CSR as the client sent it.
    """
    name = "target_prompt_logprobs"
    if tensor.dtype != "int64":
        raise RequestError(f"{name}: dtype={tensor.dtype}; send int64 token ids")
    shape = tensor.shape or []
    check_dimensions(name, shape)
    if len(shape) != 2:
        raise RequestError(f"{name}: shape={shape}; send [tokens of the prompt - 1, K]")
    values = _json_values(name, tensor)
    limits = np.iinfo(np.int32)
    values = values.clip(limits.min, limits.max).astype(np.int32)  # clipped ids are in no vocabulary either
    if tensor.sparse_crow_indices is None and tensor.sparse_col_indices is None:
        if min(shape) < 0 or shape[0] * shape[1] != values.size:
            raise RequestError(f"{name}: shape={shape} does not fit {values.size} values; send the shape of the data")
        return TokenMatrix(values, (shape[0], shape[1]))
    return sparse(name, values, *_json_indices(name, tensor), shape)


def _from_protobuf(body: bytes, max_bytes: int, max_parts: int) -> PassRequest:
    try:
        fault = _fault(body, max_parts)
        message = pb.ForwardBackwardRequest.FromString(address_of(body) if fault else body)
    except DecodeError as error:
        raise MalformedBody(f"the body is no ForwardBackwardRequest ({error}); send the SDK's protobuf") from error
    if not message.model_id or message.seq_id < 1:
        raise MalformedBody(
            f"model_id={message.model_id!r}, seq_id={message.seq_id}: both are required, seq_id from 1 on"
        )
    envelope = PassRequest(message.model_id, message.seq_id, message.forward_only)
    if fault is not None:
        return _with_error(envelope, fault)
    try:
        _refuse_unknown(message, "request")
        budget = Budget(max_bytes)
        data = [_protobuf_datum(i, datum, budget, message.loss_fn) for i, datum in enumerate(message.data)]
        config = _protobuf_config(message)
    except RequestError as error:
        return _with_error(envelope, str(error))
    return PassRequest(message.model_id, message.seq_id, message.forward_only, data, message.loss_fn, config)


def _from_json(body: bytes, max_bytes: int, bounded: bool) -> PassRequest:
    error = ""
    try:
        if bounded and len(body) > MAX_JSON_BYTES:
            raise TooLarge(
                f"the body has more than {MAX_JSON_BYTES} bytes; send fewer sequences per request, or protobuf", body
            )
        value = json_object(Body(body), partial(json_numbers.parse, bounded=bounded))
    except TooLarge as fault:
        value, error = fault.members, str(fault)
    address = read_address(ModelAddress, value)
    assert isinstance(address, ModelAddress)
    if not address.model_id or address.seq_id < 1:
        raise MalformedBody(
            f"model_id={address.model_id!r}, seq_id={address.seq_id}: both are required, seq_id from 1 on"
        )
    forward_only = "forward_input" in value
    envelope = PassRequest(address.model_id, address.seq_id, forward_only)
    if error:
        return _with_error(envelope, error)
    try:
        if forward_only:
            given = ForwardRequest.model_validate(value).forward_input
        else:
            given = ForwardBackwardRequest.model_validate(value).forward_backward_input
        data = _json_data(given, Budget(max_bytes))
    except ValidationError as error:
        return _with_error(envelope, describe_faults(error))
    except RequestError as error:
        return _with_error(envelope, str(error))
    return PassRequest(address.model_id, address.seq_id, forward_only, data, given.loss_fn, dict(given.loss_fn_config))


def _with_error(envelope: PassRequest, error: str) -> PassRequest:
    return PassRequest(envelope.model_id, envelope.seq_id, envelope.forward_only, error=error)


def _fault(body: bytes, max_parts: int) -> str | None:
    """Return the reason why a protobuf body must not be parsed completely, or None."""
    try:
        check_parts(body, max_parts)
    except RequestError as error:
        return str(error)
    return None


def _protobuf_datum(i: int, message: pb.Datum, budget: Budget, loss_fn: str) -> Datum:
    try:
        _refuse_unknown(message, "datum")
        tokens = [_protobuf_chunk(chunk) for chunk in message.model_input]
        inputs = {name: _protobuf_tensor(name, tensor, budget) for name, tensor in message.loss_fn_inputs.items()}
        joined_tokens = tokens[0] if len(tokens) == 1 else np.concatenate([np.zeros(0, np.int32), *tokens])
        spans = message.loss_fn_input_spans if loss_fn in NEEDING else ()
        return Datum(joined_tokens, inputs, _sampled(spans, len(joined_tokens)))
    except RequestError as error:
        raise RequestError(f"datum {i}: {error}") from None


def _sampled(spans: Sequence[pb.ProvenanceSpan], length: int) -> np.ndarray | None:
    """Build the mask of sampled targets, bool `[length]`, from provenance spans. None without spans."""
    if not spans:
        return None
    lengths = [getattr(span, span.WhichOneof("span") or "prompt_tokens").length for span in spans]
    if min(lengths) < 0 or sum(lengths) != length:
        raise RequestError(
            f"loss_fn_input_spans have lengths {lengths[:8]}{'...' * (len(lengths) > 8)}, in all {sum(lengths)}; they "
            f"must add up to the {length} target_tokens, one span after another"
        )
    return np.repeat([span.WhichOneof("span") == "sampled_tokens" for span in spans], lengths)


def _protobuf_chunk(chunk: pb.Chunk) -> np.ndarray:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise RequestError(_only_text(kind or "unknown"))
    return from_bytes("model_input", chunk.encoded_text.tokens, DTYPES[pb.DTYPE_INT32])


def _protobuf_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    config = {}
    for key, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise RequestError(f"loss_fn_config[{key!r}] has neither a number nor a text; send one, or leave it out")
        config[key] = getattr(value, kind)
    return config


def _protobuf_tensor(name: str, tensor: pb.Tensor, budget: Budget) -> np.ndarray:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise RequestError(f"{name}: dtype={tensor.dtype} is not served; send FLOAT32 (1) or INT64 (2)")
    check_dimensions(name, tensor.shape)
    shape = list(tensor.shape)
    match tensor.WhichOneof("encoding"):
        case "dense":
            return dense(name, from_bytes(name, tensor.dense, dtype), shape, budget)
        case "sparse_csr":
            csr = tensor.sparse_csr
            rows = from_bytes(f"{name}: crow_indices", csr.crow_indices, np.dtype("<i8"))
            columns = from_bytes(f"{name}: col_indices", csr.col_indices, np.dtype("<i8"))
            return densified(name, from_bytes(name, csr.values, dtype), rows, columns, shape, budget)
        case _:
            raise RequestError(f"{name}: the tensor has no values; send dense or sparse_csr")


def _json_data(given: PassInput, budget: Budget) -> list[Datum]:
    data = []
    for i, datum in enumerate(given.data):
        try:
            inputs = {name: _json_tensor(name, tensor, budget) for name, tensor in datum.loss_fn_inputs.items()}
            data.append(Datum(prompt_tokens(datum.model_input), inputs))
        except RequestError as error:
            raise RequestError(f"datum {i}: {error}") from None
    return data


def _json_tensor(name: str, tensor: TensorData, budget: Budget) -> np.ndarray:
    values = _json_values(name, tensor)
    shape = tensor.shape or []
    if tensor.sparse_crow_indices is None and tensor.sparse_col_indices is None:
        return dense(name, values, shape, budget)
    return densified(name, values, *_json_indices(name, tensor), shape, budget)


def _json_values(name: str, tensor: TensorData) -> np.ndarray:
    if tensor.dtype != "int64":
        return float32s(name, tensor.data)
    if not _are_integers(tensor.data):
        raise RequestError(f"{name}: dtype=int64 with fractions in data; send integers, or float32")
    return int64s(name, tensor.data)


def _are_integers(values: Sequence[float] | np.ndarray) -> bool:
    if isinstance(values, np.ndarray):
        return values.dtype.kind == "i"
    return all(isinstance(value, int) for value in values)


def _json_indices(name: str, tensor: TensorData) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = tensor.sparse_crow_indices, tensor.sparse_col_indices
    return (
        int64s(f"{name}: sparse_crow_indices", [] if rows is None else rows),
        int64s(f"{name}: sparse_col_indices", [] if columns is None else columns),
    )


# -- results ----------------------------------------------------------------------------------------------------------


def encode_forward_backward(output: ForwardBackwardOutput) -> bytes:
    """Encode the result of a pass as protobuf, with every field of the outputs.

    Consecutive datums share an `ArrayRecord` if their shapes are equal except for the first dimension, such as [N, K]
    targets with the same K.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics)
    for _, group in groupby(output.loss_fn_outputs, _trailing_shapes):
        datums = list(group)
        record = message.loss_fn_outputs.add(num_datums=len(datums))
        for name in datums[0]:
            _fill_batched(record.fields[name], [datum[name] for datum in datums])
    return message.SerializeToString()


def forward_backward_json(output: ForwardBackwardOutput) -> dict[str, Any]:
    """Convert the result of a pass to JSON for clients without protobuf. `strict_json` must write it.

    Numbers may be NaN.
    """
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": [
            {
                name: {"data": array.ravel(), "dtype": array.dtype.name, "shape": list(array.shape)}
                for name, array in datum.items()
            }
            for datum in output.loss_fn_outputs
        ],
        "metrics": output.metrics,
    }


def encode_sample(output: SampleOutput) -> bytes:
    """Encode the samples of one prompt as protobuf."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=output.prompt_cache_hit_tokens)
    for sequence in output.sequences:
        sampled = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=_bytes(sequence.tokens, "<i4"),
            logprobs=_bytes(sequence.logprobs, "<f4"),
        )
        if sequence.topk_logprobs is not None:
            _fill_topk(sampled.topk_sampled_logprobs, sequence.topk_logprobs)
    if output.target_prompt_logprobs is not None:
        _fill_cells(message.target_prompt_logprobs, output.target_prompt_logprobs)
    if output.prompt_alt_tokens is not None:
        tokens, logprobs = output.prompt_alt_tokens
        _fill_cells(message.prompt_alt_tokens.tokens, _all_cells(tokens))
        _fill_cells(message.prompt_alt_tokens.logprobs, _all_cells(logprobs))
    parts: list[Part] = [message.SerializeToString()]
    if output.prompt_logprobs is not None:
        parts += field_of(pb.SampleResponse.PROMPT_LOGPROBS_FIELD_NUMBER, [array(output.prompt_logprobs, "<f4")])
    if output.topk_prompt_logprobs is not None:
        parts += field_of(pb.SampleResponse.TOPK_PROMPT_LOGPROBS_FIELD_NUMBER, _topk_parts(output.topk_prompt_logprobs))
    return joined(parts)


def sample_json(output: SampleOutput) -> dict[str, Any]:
    """Convert the samples of one prompt to JSON for clients without protobuf. `strict_json` must write it.

    Undefined prompt logprobs are null.
    """
    result: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": sequence.stop_reason,
                "tokens": sequence.tokens,
                "logprobs": sequence.logprobs,
                **({} if sequence.topk_logprobs is None else {"topk_logprobs": _topk_json(sequence.topk_logprobs)}),
            }
            for sequence in output.sequences
        ],
        "prompt_cache_hit_tokens": output.prompt_cache_hit_tokens,
    }
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = (None if value != value else value for value in output.prompt_logprobs.tolist())
    if output.topk_prompt_logprobs is not None:
        result["topk_prompt_logprobs"] = _topk_json(output.topk_prompt_logprobs)
    if output.target_prompt_logprobs is not None:
        result["target_prompt_logprobs"] = _cells_json(output.target_prompt_logprobs)
    if output.prompt_alt_tokens is not None:
        tokens, logprobs = (_cells_json(_all_cells(array)) for array in output.prompt_alt_tokens)
        result["prompt_alt_tokens"] = {"tokens": tokens | {"dtype": "int64"}, "logprobs": logprobs}
    return result


EMPTY_CELL = -99999.0
"""Logprob that marks an empty entry of a top-k table."""


def _topk_parts(table: TokenTable) -> list[Part]:
    """Encode the `TopkLogprobs` of a whole prompt."""
    token_ids, logprobs = table
    length, k = token_ids.shape
    return [
        pb.TopkLogprobs(length=length, k=k).SerializeToString(),
        *field_of(pb.TopkLogprobs.TOKEN_IDS_FIELD_NUMBER, [array(token_ids, "<i4")]),
        *field_of(pb.TopkLogprobs.LOGPROBS_FIELD_NUMBER, [array(logprobs, "<f4")]),
    ]


def _fill_topk(message: pb.TopkLogprobs, table: TokenTable) -> None:
    token_ids, logprobs = table
    message.token_ids, message.logprobs = _bytes(token_ids, "<i4"), _bytes(logprobs, "<f4")
    message.length, message.k = token_ids.shape


def _topk_json(table: TokenTable) -> Iterator[list[tuple[int, float]] | None]:
    """Yield the table row by row: as Python objects, a whole table would take fifty times the memory of its arrays."""
    for ids, logprobs in zip(*table, strict=True):
        row = list(zip(ids.tolist(), logprobs.tolist(), strict=True))
        yield None if not row or row[0][1] == EMPTY_CELL else row


def _all_cells(matrix: np.ndarray) -> TokenMatrix:
    return TokenMatrix(matrix.ravel(), (matrix.shape[0], matrix.shape[1]))


def _fill_cells(message: pb.Tensor, cells: TokenMatrix) -> None:
    dtype = cells.values.dtype.newbyteorder("<")
    message.dtype = DTYPE_NUMBERS[dtype]
    message.shape.extend(cells.shape)
    if cells.crow_indices is None or cells.col_indices is None:
        message.dense = _bytes(cells.values, dtype)
        return
    message.sparse_csr.values = _bytes(cells.values, dtype)
    message.sparse_csr.crow_indices = _bytes(cells.crow_indices, "<i8")
    message.sparse_csr.col_indices = _bytes(cells.col_indices, "<i8")


def _cells_json(cells: TokenMatrix) -> dict[str, Any]:
    value = {"data": cells.values, "dtype": cells.values.dtype.name, "shape": list(cells.shape)}
    if cells.crow_indices is None or cells.col_indices is None:
        return value
    return value | {"sparse_crow_indices": cells.crow_indices, "sparse_col_indices": cells.col_indices}


def _trailing_shapes(datum: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape[1:] for name, array in datum.items()}


def _fill_batched(message: pb.BatchedTensor, arrays: list[np.ndarray]) -> None:
    dtype = arrays[0].dtype.newbyteorder("<")
    message.data = b"".join(_bytes(array, dtype) for array in arrays)
    message.offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8").tobytes()
    message.dtype = DTYPE_NUMBERS[dtype]
    message.trailing_shape.extend(arrays[0].shape[1:])


def _bytes(array: np.ndarray, dtype: str | np.dtype) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


# -- details ----------------------------------------------------------------------------------------------------------


def _refuse_unknown(message: Message, what: str) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise unknown_field(unknown[0].field_number, what)


def _only_text(kind: str) -> str:
    return f"model_input: a chunk of type {kind!r}, but this server's models read text; send encoded_text chunks only"


def _unzstd(body: bytes, max_bytes: int) -> bytes:
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    whole, read, piece, pace = BytesIO(), 0, ZSTD_PIECE // 32, Pace()
    try:
        if body and zstandard.frame_content_size(body) > max_bytes:  # the declared size, -1 if unknown
            raise BodyTooLarge(too_large_pass(max_bytes))
        while read < len(body) and not decompressor.eof:
            made = whole.write(decompressor.decompress(body[read : read + piece]))
            read += piece
            piece = min(max(1, piece * ZSTD_MAKES // max(1, made)), 2 * piece, ZSTD_PIECE)
            if whole.tell() > max_bytes:
                raise BodyTooLarge(too_large_pass(max_bytes))
            pace()
    except zstandard.ZstdError as error:
        raise MalformedBody(f"the body is not zstd, as Content-Encoding says ({error})") from error
    if not decompressor.eof:
        raise MalformedBody("the zstd body ends in the middle of a frame; send all of it")
    if decompressor.unused_data or read < len(body):
        raise MalformedBody("the zstd body goes on after its frame; send one frame")
    return whole.getvalue()


def too_large_pass(max_bytes: int) -> str:
    """Return the error message for a pass whose body has more than `max_bytes`."""
    return (
        f"the body has more than {max_bytes} bytes; send fewer sequences per request, or start the server with a "
        "larger --max-body-bytes"
    )
