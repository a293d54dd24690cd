"""Conversion of protobuf results to JSON for clients with an SDK before 0.25, which does not accept protobuf.

Results are stored only as protobuf, and converted when a client requests JSON.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from skyrl.tinker.identity.ids import is_sample
from skyrl.tinker.wire import strict_json
from skyrl.tinker.wire.codec import DTYPES, forward_backward_json, sample_json
from skyrl.tinker.wire.proto import skyrl_tinker_pb2 as pb
from skyrl.types import ForwardBackwardOutput, GeneratedSequence, SampleOutput, TokenMatrix, TokenTable


def as_json(request_id: str, result: bytes) -> Iterator[bytes]:
    """Convert a result of `codec.encode_sample` or `codec.encode_forward_backward` to JSON, in pieces."""
    payload = sample_json(_sample(result)) if is_sample(request_id) else forward_backward_json(_pass(result))
    yield from strict_json.pieces(payload)


def _pass(result: bytes) -> ForwardBackwardOutput:
    message = pb.ForwardBackwardOutput.FromString(result)
    outputs: list[dict[str, np.ndarray]] = []
    for record in message.loss_fn_outputs:
        columns = {name: _datums(batch) for name, batch in record.fields.items()}
        outputs += [{name: column[i] for name, column in columns.items()} for i in range(record.num_datums)]
    return ForwardBackwardOutput(outputs, dict(message.metrics), message.loss_fn_output_type)


def _datums(batch: pb.BatchedTensor) -> list[np.ndarray]:
    dtype, shape = DTYPES[batch.dtype], (-1, *batch.trailing_shape)
    offsets = np.frombuffer(batch.offsets, "<i8") // dtype.itemsize
    values = np.frombuffer(batch.data, dtype)
    return [values[start:end].reshape(shape) for start, end in pairwise(offsets)]


def _sample(result: bytes) -> SampleOutput:
    message = pb.SampleResponse.FromString(result)
    sequences = [
        GeneratedSequence(
            np.frombuffer(sequence.tokens, "<i4"),
            np.frombuffer(sequence.logprobs, "<f4"),
            "stop" if sequence.stop_reason == pb.STOP_REASON_STOP else "length",
            _topk(sequence.topk_sampled_logprobs) if sequence.HasField("topk_sampled_logprobs") else None,
        )
        for sequence in message.sequences
    ]
    return SampleOutput(
        sequences,
        np.frombuffer(message.prompt_logprobs, "<f4") if message.HasField("prompt_logprobs") else None,
        _topk(message.topk_prompt_logprobs) if message.HasField("topk_prompt_logprobs") else None,
        message.prompt_cache_hit_tokens,
        _cells(message.target_prompt_logprobs) if message.HasField("target_prompt_logprobs") else None,
        _alternatives(message.prompt_alt_tokens) if message.HasField("prompt_alt_tokens") else None,
    )


def _topk(table: pb.TopkLogprobs) -> TokenTable:
    shape = (table.length, table.k)
    return np.frombuffer(table.token_ids, "<i4").reshape(shape), np.frombuffer(table.logprobs, "<f4").reshape(shape)


def _alternatives(drawn: pb.PromptAltTokens) -> TokenTable:
    tokens, logprobs = _cells(drawn.tokens), _cells(drawn.logprobs)
    return tokens.values.reshape(tokens.shape), logprobs.values.reshape(logprobs.shape)


def _cells(tensor: pb.Tensor) -> TokenMatrix:
    dtype, shape = DTYPES[tensor.dtype], (tensor.shape[0], tensor.shape[1])
    if tensor.WhichOneof("encoding") == "dense":
        return TokenMatrix(np.frombuffer(tensor.dense, dtype), shape)
    csr = tensor.sparse_csr
    indices = np.frombuffer(csr.crow_indices, "<i8"), np.frombuffer(csr.col_indices, "<i8")
    return TokenMatrix(np.frombuffer(csr.values, dtype), shape, *indices)
