"""The wire against the real SDK's own encoders and decoders, and against bodies written out here."""

import json

import numpy as np
import pytest
import torch
import zstandard
from tinker import types as sdk
from tinker.proto import request_conv, response_conv
from tinker.proto import tinker_public_pb2 as sdk_pb
from tinker.types._pydantic_types import tensor_data as sdk_json

from skyrl.errors import RequestError
from skyrl.tinker.errors import MalformedBody
from skyrl.tinker.wire import codec, strict_json
from skyrl.tinker.wire.proto import skyrl_tinker_pb2 as pb
from skyrl.tinker.wire.schemas import MAX_DATUMS, ModelInput
from skyrl.types import ForwardBackwardOutput, GeneratedSequence, SampleOutput

MAX_BYTES = 1_000_000
JSON = "application/json"


def sdk_request(data: list[sdk.Datum], loss_fn="cross_entropy", config=None) -> sdk.ForwardBackwardRequest:
    inputs = sdk.ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config)
    return sdk.ForwardBackwardRequest(model_id="s:train:0", seq_id=3, forward_backward_input=inputs)


def sdk_body(data: list[sdk.Datum], loss_fn="cross_entropy", config=None) -> bytes:
    """Return the body that the SDK sends, as protobuf."""
    return request_conv.forward_backward_request_to_proto(sdk_request(data, loss_fn, config)).SerializeToString()


def decode(body: bytes, content_type: str = codec.PROTOBUF, encoding: str | None = None, max_bytes: int = MAX_BYTES):
    return codec.decode_forward_backward(body, content_type, encoding, max_bytes)


def datum(tokens=(1, 2, 3), **inputs) -> sdk.Datum:
    return sdk.Datum(model_input=sdk.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)


def simple() -> sdk.Datum:
    return datum(target_tokens=np.array([2, 3, 4]), weights=np.array([0.0, 1.0, -1.5], np.float32))


def assert_simple(request: codec.PassRequest) -> None:
    assert request.error is None
    (decoded,) = request.data
    np.testing.assert_array_equal(decoded.tokens, np.array([1, 2, 3], np.int32))
    np.testing.assert_array_equal(decoded.loss_fn_inputs["target_tokens"], [2, 3, 4])
    np.testing.assert_array_equal(decoded.loss_fn_inputs["weights"], np.array([0.0, 1.0, -1.5], np.float32))
    assert decoded.tokens.dtype == np.int32
    assert decoded.loss_fn_inputs["target_tokens"].dtype == np.int64
    assert decoded.loss_fn_inputs["weights"].dtype == np.float32


# -- requests as protobuf ---------------------------------------------------------------------------------------------


def test_a_request_of_the_sdk_is_read():
    request = decode(sdk_body([simple()], "ppo", {"clip_low_threshold": 0.9, "note": "x"}))
    assert (request.model_id, request.seq_id, request.forward_only) == ("s:train:0", 3, False)
    assert (request.loss_fn, request.loss_fn_config) == ("ppo", {"clip_low_threshold": 0.9, "note": "x"})
    assert_simple(request)


def test_forward_only_is_read():
    message = sdk_pb.ForwardBackwardRequest.FromString(sdk_body([simple()]))
    message.forward_only = True
    assert decode(message.SerializeToString()).forward_only


def test_the_older_config_map_is_read_where_there_is_no_newer_one():
    message = sdk_pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn_config={"beta": 0.25})
    assert decode(message.SerializeToString()).loss_fn_config == {"beta": 0.25}


def test_the_newer_config_map_wins():
    message = sdk_pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn_config={"beta": 0.25})
    message.loss_fn_config_v2["beta"].number = 0.5
    assert decode(message.SerializeToString()).loss_fn_config == {"beta": 0.5}


def test_a_config_value_of_no_kind_is_refused():
    message = sdk_pb.ForwardBackwardRequest(model_id="m", seq_id=1)
    message.loss_fn_config_v2["beta"].SetInParent()
    assert "'beta'" in decode(message.SerializeToString()).error


def test_chunks_are_joined():
    chunks = [sdk.EncodedTextChunk(tokens=part) for part in ([1], [], [2, 3])]
    inputs = {"target_tokens": np.array([2, 3, 4]), "weights": np.array([0.0, 1.0, -1.5], np.float32)}
    assert_simple(decode(sdk_body([sdk.Datum(model_input=sdk.ModelInput(chunks=chunks), loss_fn_inputs=inputs)])))


def test_sparse_targets_and_weights_of_different_patterns_equal_dense_ones():
    targets = torch.zeros((3, 400), dtype=torch.int64)
    weights = torch.zeros((3, 400))
    targets[0, 7], targets[2, 399], weights[0, 7], weights[1, 3] = 9, 8, 0.5, 2.0
    body = sdk_body([datum(target_tokens=targets, weights=weights)])
    message = sdk_pb.ForwardBackwardRequest.FromString(body)
    assert message.data[0].loss_fn_inputs["weights"].HasField("sparse_csr")

    (decoded,) = decode(body).data
    np.testing.assert_array_equal(decoded.loss_fn_inputs["target_tokens"], targets.numpy())
    np.testing.assert_array_equal(decoded.loss_fn_inputs["weights"], weights.numpy())


def test_zstd_bodies_of_many_pieces_are_read():
    tokens = np.random.default_rng(0).integers(0, 2**31, 20_000)
    body = sdk_body([datum(tokens, target_tokens=tokens)])
    compressed = zstandard.compress(body)
    assert len(compressed) > 10 * codec.ZSTD_PIECE
    (decoded,) = decode(compressed, encoding="zstd").data
    np.testing.assert_array_equal(decoded.loss_fn_inputs["target_tokens"], tokens)


def test_our_messages_and_the_sdks_live_in_one_process_and_agree_on_every_field():
    def fields(message) -> set[tuple[int, str, int]]:
        return {(f.number, f.name, f.type) for f in message.fields}

    theirs = sdk_pb.DESCRIPTOR.message_types_by_name
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        if name != "TokenSpan":
            assert fields(message) == fields(theirs[name]), name
    assert fields(pb.TokenSpan.DESCRIPTOR) == fields(theirs["SampledProvenanceSpan"])


# -- requests as JSON -------------------------------------------------------------------------------------------------

JSON_DATUM = {
    "model_input": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}, {"tokens": [3]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
        "weights": {"data": [0, 1.0, -1.5], "dtype": "float32"},
    },
}


def json_body(key: str = "forward_backward_input", *, datum=JSON_DATUM, **content) -> bytes:
    inputs = {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": None} | content
    return json.dumps({key: inputs, "model_id": "s:train:0", "seq_id": 3}).encode()


def json_datum(**weights) -> dict:
    return JSON_DATUM | {"loss_fn_inputs": {"weights": weights}}


def test_a_json_pass_is_read():
    request = decode(json_body(loss_fn_config={"beta": 1}), "application/json; charset=utf-8")
    assert (request.model_id, request.seq_id, request.forward_only) == ("s:train:0", 3, False)
    assert (request.loss_fn, request.loss_fn_config) == ("cross_entropy", {"beta": 1.0})
    assert_simple(request)


def test_a_json_forward_is_read():
    request = decode(json_body("forward_input"), JSON)
    assert request.forward_only
    assert_simple(request)


def test_a_json_csr_matrix_is_read():
    csr = {"data": [5.0, 6.0], "dtype": "float32", "shape": [2, 3]}
    csr |= {"sparse_crow_indices": [0, 0, 2], "sparse_col_indices": [2, 0]}
    (decoded,) = decode(json_body(datum=json_datum(**csr)), JSON).data
    np.testing.assert_array_equal(decoded.loss_fn_inputs["weights"], [[0, 0, 0], [6, 0, 5]])


def test_a_json_input_as_the_sdk_dumps_it_is_read():
    chunks = [sdk.EncodedTextChunk(tokens=[1, 2, 3])]
    tensors = {"target_tokens": np.array([2, 3, 4]), "weights": np.array([0.0, 1.0, -1.5], np.float32)}
    inputs = {name: sdk_json.TensorData.from_numpy(array) for name, array in tensors.items()}
    value = {
        "model_input": sdk.ModelInput(chunks=chunks).model_dump(mode="json"),
        "loss_fn_inputs": {name: tensor.model_dump(mode="json") for name, tensor in inputs.items()},
    }
    assert_simple(decode(json_body(datum=value), JSON))


# -- faulty contents: the request keeps its place ---------------------------------------------------------------------


def message_with(**tensor) -> bytes:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1)
    message.data.add().loss_fn_inputs["weights"].CopyFrom(pb.Tensor(**{"dtype": pb.DTYPE_FLOAT32} | tensor))
    return message.SerializeToString()


def csr(shape, crow, col, values=(1.0, 2.0)) -> bytes:
    arrays = {"values": np.float32(values), "crow_indices": np.int64(crow), "col_indices": np.int64(col)}
    sparse = pb.SparseCsr(**{name: array.tobytes() for name, array in arrays.items()})
    return message_with(sparse_csr=sparse, shape=shape)


def chunk(**kind) -> bytes:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1)
    message.data.add().model_input.add(**kind)
    return message.SerializeToString()


FAULTY = {
    "half a token": (chunk(encoded_text=pb.EncodedTextChunk(tokens=b"\1\0")), r"datum 0: model_input: 2 bytes"),
    "image": (chunk(image=pb.ImageChunk(data=b"x")), r"datum 0: model_input: a chunk of type 'image'"),
    "audio": (chunk(dmel=pb.DmelChunk(dmel=b"x")), r"'dmel'"),
    "empty chunk": (chunk(), r"'unknown'"),
    "half a float": (message_with(dense=b"\0\0\0"), r"weights: 3 bytes is not a multiple of the size of float32"),
    "no dtype": (message_with(dense=b"", dtype=0), r"dtype=0 is not served"),
    "bfloat16": (message_with(dense=b"", dtype=pb.DTYPE_BFLOAT16), r"dtype=4"),
    "unknown dtype": (message_with(dense=b"", dtype=77), r"dtype=77"),
    "no values": (message_with(), r"the tensor has no values"),
    "wrong shape": (message_with(dense=bytes(8), shape=[3]), r"shape=\[3\] does not fit 2 values"),
    "negative shape": (message_with(dense=bytes(8), shape=[-1, -2]), r"shape=\[-1, -2\]"),
    "huge shape": (message_with(dense=bytes(8), shape=[2**62, 2**62]), r"does not fit"),
    "three dimensions": (message_with(dense=bytes(8), shape=[1, 2, 1]), r"3 dimensions"),
    "sparse vector": (csr([3], [0, 2], [0, 1]), r"send \[tokens, K\]"),
    "sparse negative": (csr([-1, 3], [0, 2], [0, 1]), r"shape=\[-1, 3\]"),
    "sparse bomb": (csr([1, 2**40], [0, 2], [0, 1]), r"larger than 1000000 bytes"),
    "sparse overflow": (csr([2**62, 2**62], [0, 2], [0, 1]), r"larger than"),
    "sparse rows of nothing": (csr([2**40, 0], [0, 2], [0, 1]), r"larger than"),
    "sparse columns of nothing": (csr([0, 2**62], [0], [], values=()), r"larger than"),
    "columns of nothing": (message_with(dense=b"", shape=[0, 2**62]), r"larger than"),
    "no rows": (csr([2, 3], [], [0, 1]), r"send 3 ascending offsets from 0 to 2"),
    "descending rows": (csr([2, 3], [0, 3, 2], [0, 1]), r"crow_indices"),
    "rows from 1": (csr([2, 3], [1, 1, 2], [0, 1]), r"crow_indices"),
    "rows that overflow": (csr([3, 3], [0, 2**63 - 1, -2, 2], [0, 1]), r"crow_indices"),
    "few columns": (csr([2, 3], [0, 1, 2], [0]), r"col_indices do not place"),
    "column too large": (csr([2, 3], [0, 1, 2], [0, 3]), r"col_indices"),
    "negative column": (csr([2, 3], [0, 1, 2], [0, -1]), r"col_indices"),
    "cell twice": (csr([2, 3], [0, 2, 2], [1, 1]), r"duplicate entries in col_indices"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTY)
def test_a_faulty_protobuf_request_keeps_its_place_and_says_why(case):
    body, message = FAULTY[case]
    request = decode(body)
    assert (request.model_id, request.seq_id, request.data) == ("m", 1, [])
    with pytest.raises(RequestError, match=message):
        raise RequestError(request.error)


def test_arrays_that_are_too_large_together_are_refused():
    message = pb.ForwardBackwardRequest.FromString(csr([2, 200], [0, 2, 2], [0, 1]))
    message.data.extend([message.data[0]] * 2)
    body = message.SerializeToString()
    assert decode(body, max_bytes=3 * 1600).error is None
    assert "shape=[2, 200] makes the arrays of the request larger than 4799" in decode(body, max_bytes=4799).error


def test_a_crowd_of_datums_is_refused():
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1)
    message.data.extend([pb.Datum()] * (MAX_DATUMS + 1))
    assert decode(message.SerializeToString()).error == "data has more than 16384 datums; send fewer per request"


def test_a_field_of_a_newer_protocol_is_refused_by_number():
    body = sdk_body([simple()]) + b"\x98\x06\x01"  # field 99, varint 1
    assert "field number 99 of the request" in decode(body).error


FAULTY_JSON = {
    "no input": (b'{"model_id": "s:train:0", "seq_id": 3}', r"forward_backward_input: is required"),
    "unknown option": (json_body(fast=True), r"forward_backward_input.fast: is not a field"),
    "unknown tensor field": (json_body(datum=json_datum(data=[], dtype="int64", codec=1)), r"codec: is not a field"),
    "text among numbers": (json_body(datum=json_datum(data=[1, "2"], dtype="int64")), r"weights.data"),
    "null among numbers": (json_body(datum=json_datum(data=[None], dtype="float32")), r"weights.data"),
    "fraction in int64": (json_body(datum=json_datum(data=[1.5], dtype="int64")), r"weights: dtype=int64 with frac"),
    "integer beyond int64": (json_body(datum=json_datum(data=[2**63], dtype="int64")), r"does not fit into 64 bits"),
    "integer beyond float": (json_body(datum=json_datum(data=[10**400], dtype="float32")), r"float32"),
    "unknown dtype": (json_body(datum=json_datum(data=[], dtype="float16")), r"dtype"),
    "negative shape": (json_body(datum=json_datum(data=[1], dtype="int64", shape=[-1])), r"shape=\[-1\]"),
    "sparse without rows": (
        json_body(datum=json_datum(data=[1], dtype="int64", shape=[1, 2], sparse_col_indices=[0])), r"crow_indices"
    ),
    "sparse without shape": (
        json_body(datum=json_datum(data=[1], dtype="int64", sparse_crow_indices=[0, 1], sparse_col_indices=[0])),
        r"shape=\[\]",
    ),
    "image": (
        json_body(datum=JSON_DATUM | {"model_input": {"chunks": [{"data": "aGk=", "format": "png"}]}}), r"'image'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTY_JSON)
def test_a_faulty_json_request_keeps_its_place_and_says_why(case):
    body, message = FAULTY_JSON[case]
    request = decode(body, JSON)
    assert (request.model_id, request.seq_id, request.data) == ("s:train:0", 3, [])
    with pytest.raises(RequestError, match=message):
        raise RequestError(request.error)


# -- malformed bodies -------------------------------------------------------------------------------------------------

BOMB = zstandard.compress(bytes(50 * MAX_BYTES))
BODY = sdk_body([simple()])
ZSTD = zstandard.compress(BODY)

MALFORMED = {
    "empty": (b"", codec.PROTOBUF, None, "model_id=''"),
    "no protobuf": (b"\xff" * 20, codec.PROTOBUF, None, "no ForwardBackwardRequest"),
    "truncated": (BODY[:-3], codec.PROTOBUF, None, "no ForwardBackwardRequest"),
    "no seq_id": (pb.ForwardBackwardRequest(model_id="m").SerializeToString(), codec.PROTOBUF, None, "seq_id=0"),
    "negative seq_id": (
        pb.ForwardBackwardRequest(model_id="m", seq_id=-1).SerializeToString(), codec.PROTOBUF, None, "seq_id=-1"
    ),
    "bomb": (BOMB, codec.PROTOBUF, "zstd", "more than 1000000 bytes"),
    "too large": (bytes(MAX_BYTES + 1), codec.PROTOBUF, None, "more than 1000000 bytes"),
    "no zstd": (BODY, codec.PROTOBUF, "zstd", "is not zstd"),
    "truncated zstd": (ZSTD[:-5], codec.PROTOBUF, "zstd", "middle of a frame"),
    "empty zstd": (b"", codec.PROTOBUF, "zstd", "middle of a frame"),
    "more after zstd": (ZSTD + b"more", codec.PROTOBUF, "zstd", "after its frame"),
    "much more after zstd": (ZSTD + bytes(5000), codec.PROTOBUF, "zstd", "after its frame"),
    "other encoding": (BODY, codec.PROTOBUF, "br", "Content-Encoding: br"),
    "other type": (BODY, "text/plain", None, "Content-Type: text/plain"),
    "no json": (b"{", JSON, None, "not JSON"),
    "deep json": (b'{"a":' + b"[" * 100_000, JSON, None, "not JSON"),
    "json list": (b"[]", JSON, None, "send an object"),
    "json without ids": (b"{}", JSON, None, "model_id: is required"),
    "json with seq_id 0": (b'{"model_id": "m", "seq_id": 0}', JSON, None, "seq_id=0"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_body_is_told_apart(case):
    body, content_type, encoding, message = MALFORMED[case]
    with pytest.raises(MalformedBody, match=message):
        decode(body, content_type, encoding)


# -- prompts ----------------------------------------------------------------------------------------------------------


def prompt(*chunks: dict) -> np.ndarray:
    return codec.prompt_tokens(ModelInput.model_validate({"chunks": list(chunks)}))


def test_a_prompt_is_its_chunks_joined_with_and_without_types():
    tokens = prompt({"tokens": [1, 2], "type": "encoded_text"}, {"tokens": []}, {"tokens": [3]})
    np.testing.assert_array_equal(tokens, [1, 2, 3])
    assert tokens.dtype == np.int32


def test_a_prompt_without_chunks_is_empty():
    assert prompt().shape == (0,)


@pytest.mark.parametrize(
    ("chunk", "kind"),
    [
        ({"type": "image", "data": "aGk=", "format": "png"}, "image"),
        ({"location": "tinker://x", "format": "png"}, "image_asset_pointer"),
        ({"dmel": "aGk="}, "dmel"),
        ({"type": "video"}, "video"),
    ],
)
def test_anything_but_text_is_refused_by_its_type(chunk, kind):
    with pytest.raises(RequestError, match=f"chunk of type '{kind}'"):
        prompt(chunk)


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**63])
def test_a_token_that_is_no_int32_is_refused(token):
    with pytest.raises(RequestError, match=r"no vocabulary|64 bits"):
        prompt({"tokens": [0, token]})


# -- results ----------------------------------------------------------------------------------------------------------


def outputs(*shapes: tuple[int, ...]) -> ForwardBackwardOutput:
    rng = np.random.default_rng(0)
    records = [
        {"logprobs": rng.normal(size=shape).astype(np.float32), "elementwise_loss": np.zeros(shape[0], np.float32)}
        for shape in shapes
    ]
    return ForwardBackwardOutput(records, {"loss:sum": 1.5})


def assert_outputs_equal(result: sdk.ForwardBackwardOutput, expected: ForwardBackwardOutput) -> None:
    assert result.metrics == expected.metrics
    assert len(result.loss_fn_outputs) == len(expected.loss_fn_outputs)
    for got, want in zip(result.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        assert got.keys() == want.keys()
        for name, array in want.items():
            np.testing.assert_array_equal(got[name].to_numpy(), array)


def test_the_sdk_reads_the_result_of_a_pass():
    output = outputs((3,), (5,), (1,))
    assert_outputs_equal(
        response_conv.deserialize_forward_backward_output(codec.encode_forward_backward(output)), output
    )


def test_the_sdk_reads_results_of_ragged_k_in_request_order():
    output = outputs((3, 2), (4, 2), (2,), (2, 5), (2, 2))
    encoded = codec.encode_forward_backward(output)
    assert len(pb.ForwardBackwardOutput.FromString(encoded).loss_fn_outputs) == 4
    assert_outputs_equal(response_conv.deserialize_forward_backward_output(encoded), output)


def test_the_sdk_reads_the_tensors_of_a_json_result():
    output = outputs((3,), (2, 2))
    value = json.loads(strict_json.dumps(codec.forward_backward_json(output)))
    assert (value["loss_fn_output_type"], value["metrics"]) == ("ArrayRecord", {"loss:sum": 1.5})
    for got, want in zip(value["loss_fn_outputs"], output.loss_fn_outputs, strict=True):
        for name, array in want.items():
            np.testing.assert_array_equal(sdk_json.TensorData.model_validate(got[name]).to_numpy(), array)


def samples() -> SampleOutput:
    sequences = [
        GeneratedSequence(np.array([5, 6], np.int32), np.array([-0.5, -0.25], np.float32), "stop"),
        GeneratedSequence(np.array([7], np.int32), np.array([-1.0], np.float32), "length"),
    ]
    top = (np.array([[0, 0], [3, 4]], np.int32), np.array([[-99999.0] * 2, [-0.5, -1.5]], np.float32))
    return SampleOutput(sequences, np.array([np.nan, -2.0], np.float32), top, 1)


def test_the_sdk_reads_samples():
    result = response_conv.deserialize_sample_response(codec.encode_sample(samples()))
    assert [sequence.stop_reason for sequence in result.sequences] == ["stop", "length"]
    assert [list(sequence.tokens) for sequence in result.sequences] == [[5, 6], [7]]
    assert [list(sequence.logprobs) for sequence in result.sequences] == [[-0.5, -0.25], [-1.0]]
    assert result.prompt_cache_hit_tokens == 1
    assert list(result.prompt_logprobs) == [None, -2.0]
    assert list(result.topk_prompt_logprobs) == [None, [(3, -0.5), (4, -1.5)]]


def test_samples_without_prompt_logprobs_have_none():
    result = response_conv.deserialize_sample_response(codec.encode_sample(SampleOutput(samples().sequences)))
    assert result.prompt_logprobs is None
    assert result.topk_prompt_logprobs is None


def test_undefined_prompt_logprobs_are_null_in_json():
    value = json.loads(strict_json.dumps(codec.sample_json(samples())))
    assert value["sequences"][0] == {"stop_reason": "stop", "tokens": [5, 6], "logprobs": [-0.5, -0.25]}
    assert value["prompt_logprobs"] == [None, -2.0]
    assert value["topk_prompt_logprobs"] == [None, [[3, -0.5], [4, -1.5]]]
