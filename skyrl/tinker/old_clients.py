"""Protobuf results as JSON, for clients before 0.25 that do not accept protobuf.

Results are stored once, in protobuf; who asks for JSON gets it made from that.
"""

from itertools import pairwise

import numpy as np

from skyrl.tinker import json_text
from skyrl.tinker.ids import is_sample
from skyrl.tinker.proto import skyrl_tinker_pb2 as pb
from skyrl.tinker.wire import DTYPES, forward_backward_json, sample_json
from skyrl.types import ForwardBackwardOutput, GeneratedSequence, SampleOutput


def as_json(request_id: str, result: bytes) -> bytes:
    """The JSON form of what `wire.encode_sample` or `wire.encode_forward_backward` made."""
    payload = sample_json(_sample(result)) if is_sample(request_id) else forward_backward_json(_pass(result))
    return json_text.dumps(payload)


def _pass(result: bytes) -> ForwardBackwardOutput:
    message = pb.ForwardBackwardOutput.FromString(result)
    outputs: list[dict[str, np.ndarray]] = []
    for record in message.loss_fn_outputs:
        columns = {name: _datums(batch) for name, batch in record.fields.items()}
        outputs += [{name: column[i] for name, column in columns.items()} for i in range(record.num_datums)]
    return ForwardBackwardOutput(outputs, dict(message.metrics), message.loss_fn_output_type)


def _datums(batch: pb.BatchedTensor) -> list[np.ndarray]:
    offsets = np.frombuffer(batch.offsets, "<i8")
    shape = (-1, *batch.trailing_shape)
    parts = (batch.data[start:end] for start, end in pairwise(offsets))
    return [np.frombuffer(part, DTYPES[batch.dtype]).reshape(shape) for part in parts]


def _sample(result: bytes) -> SampleOutput:
    message = pb.SampleResponse.FromString(result)
    sequences = [
        GeneratedSequence(
            np.frombuffer(sequence.tokens, "<i4"),
            np.frombuffer(sequence.logprobs, "<f4"),
            "stop" if sequence.stop_reason == pb.STOP_REASON_STOP else "length",
        )
        for sequence in message.sequences
    ]
    prompt_logprobs = topk = None
    if message.HasField("prompt_logprobs"):
        prompt_logprobs = np.frombuffer(message.prompt_logprobs, "<f4")
    if message.HasField("topk_prompt_logprobs"):
        table = message.topk_prompt_logprobs
        shape = (table.length, table.k)
        topk = np.frombuffer(table.token_ids, "<i4").reshape(shape), np.frombuffer(table.logprobs, "<f4").reshape(shape)
    return SampleOutput(sequences, prompt_logprobs, topk, message.prompt_cache_hit_tokens)
