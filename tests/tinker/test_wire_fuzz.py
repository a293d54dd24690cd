"""Decoding any bytes returns a request or raises `MalformedBody`, and never needs more than it may."""

import json
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from skyrl.errors import RequestError
from skyrl.tinker.errors import MalformedBody
from skyrl.tinker.wire import codec
from skyrl.tinker.wire.proto import skyrl_tinker_pb2 as pb
from skyrl.tinker.wire.protobuf import address_of, check_parts

MAX_BYTES = 100_000
quick = settings(max_examples=300, deadline=None)


def outcome(body: bytes, content_type: str, encoding: str | None = None) -> codec.PassRequest | MalformedBody:
    try:
        request = codec.decode_forward_backward(body, content_type, encoding, MAX_BYTES)
    except MalformedBody as error:
        return error
    used = sum(array.nbytes for datum in request.data for array in datum.loss_fn_inputs.values())
    assert used <= MAX_BYTES
    assert request.error is None or not request.data
    assert request.model_id and request.seq_id >= 1
    return request


def valid_body() -> bytes:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo", loss_fn_config={"beta": 1.0})
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(4, dtype=np.int32).tobytes()
    dense = datum.loss_fn_inputs["target_tokens"]
    dense.dtype, dense.dense = pb.DTYPE_INT64, np.arange(4).tobytes()
    dense.shape.append(4)
    csr = datum.loss_fn_inputs["weights"]
    csr.dtype = pb.DTYPE_FLOAT32
    csr.shape.extend([4, 3])
    csr.sparse_csr.values = np.ones(2, np.float32).tobytes()
    csr.sparse_csr.crow_indices = np.array([0, 1, 1, 2, 2]).tobytes()
    csr.sparse_csr.col_indices = np.array([2, 0]).tobytes()
    return message.SerializeToString(deterministic=True)


VALID = valid_body()
int64s = st.one_of(st.integers(-3, 6), st.integers(-(2**63), 2**63 - 1))


def arrays_of(elements: st.SearchStrategy[int]) -> st.SearchStrategy[bytes]:
    return st.one_of(
        st.lists(elements, max_size=6).map(lambda values: np.array(values, np.int64).tobytes()), st.binary(max_size=20)
    )


@st.composite
def tensors(draw) -> pb.Tensor:
    tensor = pb.Tensor(dtype=draw(st.integers(0, 6)), shape=draw(st.lists(int64s, max_size=3)))
    kind = draw(st.sampled_from(["dense", "csr", "none"]))
    if kind == "dense":
        tensor.dense = draw(st.binary(max_size=64))
    if kind == "csr":
        tensor.sparse_csr.values = draw(st.binary(max_size=32))
        tensor.sparse_csr.crow_indices = draw(arrays_of(int64s))
        tensor.sparse_csr.col_indices = draw(arrays_of(int64s))
    return tensor


@quick
@given(st.binary(max_size=200))
def test_arbitrary_bytes_as_protobuf(body):
    outcome(body, codec.PROTOBUF)


@quick
@given(st.integers(0, len(VALID) - 1), st.binary(max_size=6), st.integers(0, 6))
def test_the_look_before_parsing_reads_what_the_parser_reads(at, replacement, removed):
    body = VALID[:at] + replacement + VALID[at + removed :]
    try:
        message = pb.ForwardBackwardRequest.FromString(body)
        with suppress(RequestError):
            check_parts(body)  # where the parser stops at a zero, this goes on
        address = pb.ForwardBackwardRequest.FromString(address_of(body))
    except DecodeError:
        return
    assert (address.model_id, address.seq_id) == (message.model_id, message.seq_id)


@quick
@given(st.integers(0, len(VALID) - 1), st.binary(max_size=6), st.integers(0, 6))
def test_what_the_parser_does_not_know_is_refused(at, replacement, removed):
    body = VALID[:at] + replacement + VALID[at + removed :]
    result = outcome(body, codec.PROTOBUF)
    if isinstance(result, codec.PassRequest) and result.error is None:
        message = pb.ForwardBackwardRequest.FromString(body)
        assert not any(len(UnknownFieldSet(part)) for part in (message, *message.data))


@pytest.mark.full
@quick
@given(st.dictionaries(st.text(max_size=5), tensors(), max_size=3), st.binary(max_size=9))
def test_parsable_bodies_with_arbitrary_tensors_keep_their_place(inputs, tokens):
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = tokens
    for name, tensor in inputs.items():
        datum.loss_fn_inputs[name].CopyFrom(tensor)
    assert isinstance(outcome(message.SerializeToString(), codec.PROTOBUF), codec.PassRequest)


@quick
@given(st.binary(max_size=200))
def test_arbitrary_bytes_as_zstd(body):
    outcome(body, codec.PROTOBUF, "zstd")


COMPRESSED = zstandard.compress(VALID * 40)


@quick
@given(st.integers(0, len(COMPRESSED) - 1), st.binary(max_size=4), st.integers(0, 4))
def test_a_valid_zstd_body_with_bytes_replaced(at, replacement, removed):
    outcome(COMPRESSED[:at] + replacement + COMPRESSED[at + removed :], codec.PROTOBUF, "zstd")


@settings(max_examples=30, deadline=None)
@given(st.integers(MAX_BYTES + 1, 20_000_000), st.booleans())
def test_every_bomb_is_refused(size, with_size):
    compressor = zstandard.ZstdCompressor(write_content_size=with_size)
    assert isinstance(outcome(compressor.compress(bytes(size)), codec.PROTOBUF, "zstd"), MalformedBody)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda children: st.one_of(st.lists(children, max_size=3), st.dictionaries(st.text(max_size=5), children)),
    max_leaves=5,
)
tensor_values = st.fixed_dictionaries(
    {"data": st.lists(st.one_of(st.integers(), st.floats(), json_values), max_size=5)},
    optional={
        "dtype": st.sampled_from(["int64", "float32"]),
        "shape": st.one_of(st.lists(int64s, max_size=3), json_values),
        "sparse_crow_indices": st.one_of(st.lists(int64s, max_size=4), json_values),
        "sparse_col_indices": st.one_of(st.lists(int64s, max_size=4), json_values),
    },
)
chunk_values = st.dictionaries(
    st.sampled_from(["type", "tokens", "data", "location", "dmel", "format"]),
    st.one_of(st.lists(st.integers(), max_size=3), json_values),
    max_size=3,
)


@pytest.mark.full
@quick
@given(st.lists(chunk_values, max_size=2), st.dictionaries(st.text(max_size=3), tensor_values, max_size=2), json_values)
def test_json_requests_of_arbitrary_contents_keep_their_place(chunks, inputs, config):
    datum = {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}
    content = {"data": [datum], "loss_fn": "ppo", "loss_fn_config": config}
    body = json.dumps({"model_id": "m", "seq_id": 1, "forward_backward_input": content}).encode()
    assert isinstance(outcome(body, "application/json"), codec.PassRequest)


@quick
@given(st.one_of(st.binary(max_size=50), json_values.map(lambda value: json.dumps(value).encode())))
def test_arbitrary_json(body):
    outcome(body, "application/json")


@pytest.mark.full
@quick
@given(st.data())
def test_a_sparse_matrix_equals_the_dense_one(data):
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    dense = np.zeros((rows, columns), np.float32)
    for _ in range(data.draw(st.integers(0, 8))):
        dense[data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))] = data.draw(
            st.floats(-5, 5, width=32)
        )
    csr = sparse.csr_matrix(dense)
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1)
    tensor = message.data.add().loss_fn_inputs["weights"]
    tensor.dtype = pb.DTYPE_FLOAT32
    tensor.shape.extend(dense.shape)
    tensor.sparse_csr.values = csr.data.tobytes()
    tensor.sparse_csr.crow_indices = csr.indptr.astype(np.int64).tobytes()
    tensor.sparse_csr.col_indices = csr.indices.astype(np.int64).tobytes()
    request = outcome(message.SerializeToString(), codec.PROTOBUF)
    assert isinstance(request, codec.PassRequest)
    np.testing.assert_array_equal(request.data[0].loss_fn_inputs["weights"], dense)
