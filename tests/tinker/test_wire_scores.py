"""The scores of samples on the wire, as the SDK encodes and decodes them."""

import json

import numpy as np
import pytest
import tinker
import torch
from tinker.proto import response_conv

from skyrl.errors import RequestError
from skyrl.tinker.wire import codec, legacy_json
from skyrl.tinker.wire.schemas import TensorData
from skyrl.types import GeneratedSequence, SampleOutput, TokenMatrix

IDS = torch.tensor([[-1, 7, -1, -1, -1], [-1, -1, -1, -1, -1], [2, -1, -1, 0, -1]])


def sent(tensor: tinker.TensorData) -> TensorData:
    """As the SDK sends it in JSON."""
    fields = ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices")
    values = {name: getattr(tensor, name) for name in fields}
    return TensorData.model_validate(
        {name: np.asarray(v).tolist() if name == "data" else v for name, v in values.items()}
    )


def output(**scores) -> SampleOutput:
    top = (np.array([[3, 4], [5, 6]], np.int32), np.array([[-0.5, -1.5], [-0.25, -2.0]], np.float32))
    sequence = GeneratedSequence(np.array([3, 5], np.int32), np.array([-0.5, -0.25], np.float32), "length", top)
    return SampleOutput([sequence], **scores)


def decoded(result: SampleOutput) -> tinker.SampleResponse:
    return response_conv.deserialize_sample_response(codec.encode_sample(result))


@pytest.mark.parametrize(
    "encode", [tinker.TensorData.from_torch, lambda ids: tinker.TensorData.from_torch_sparse(ids, -1)]
)
def test_targets_of_the_sdk_are_read_and_their_logprobs_come_back_in_the_same_layout(encode):
    request = encode(IDS)
    cells = codec.target_matrix(sent(request))
    assert cells.values.dtype == np.int32
    logprobs = np.where(cells.values < 0, 0, -cells.values).astype(np.float32)
    answer = decoded(
        output(target_prompt_logprobs=TokenMatrix(logprobs, cells.shape, cells.crow_indices, cells.col_indices))
    ).target_prompt_logprobs
    assert (answer.sparse_crow_indices, answer.shape) == (request.sparse_crow_indices, request.shape)
    np.testing.assert_array_equal(answer.to_numpy(), np.where(IDS.numpy() < 0, 0, -IDS.numpy()))


def test_the_sdk_reads_the_most_likely_tokens_of_a_sequence():
    (sequence,) = decoded(output()).sequences
    assert sequence.topk_logprobs == [[(3, -0.5), (4, -1.5)], [(5, -0.25), (6, -2.0)]]


def test_the_sdk_reads_alternatives():
    tokens, logprobs = np.array([[1, 2, 3], [4, 5, 6]], np.int32), np.full((2, 3), -1.5, np.float32)
    drawn = decoded(output(prompt_alt_tokens=(tokens, logprobs))).prompt_alt_tokens
    assert (drawn.tokens.dtype, drawn.logprobs.dtype) == ("int64", "float32")
    np.testing.assert_array_equal(drawn.tokens.to_numpy(), tokens)
    np.testing.assert_array_equal(drawn.logprobs.to_numpy(), logprobs)


def test_alternatives_of_a_prompt_of_one_token_are_there_and_empty():
    drawn = decoded(output(prompt_alt_tokens=(np.zeros((0, 3), np.int32), np.zeros((0, 3), np.float32))))
    assert drawn.prompt_alt_tokens.tokens.to_numpy().shape == (0, 3)


def test_samples_without_scores_have_none():
    result = decoded(SampleOutput([GeneratedSequence(np.array([1], np.int32), np.array([-1.0], np.float32), "stop")]))
    assert result.target_prompt_logprobs is None and result.prompt_alt_tokens is None
    assert result.sequences[0].topk_logprobs is None


def test_scores_are_in_json_too():
    cells = codec.target_matrix(sent(tinker.TensorData.from_torch_sparse(IDS, -1)))
    drawn = (np.array([[1, 2]], np.int32), np.array([[-1.0, -2.0]], np.float32))
    targets = TokenMatrix(np.array([-1.0, -2.0, -3.0], np.float32), cells.shape, cells.crow_indices, cells.col_indices)
    encoded = codec.encode_sample(output(target_prompt_logprobs=targets, prompt_alt_tokens=drawn))
    value = json.loads(b"".join(legacy_json.as_json("sample-1", encoded)))
    assert value["sequences"][0]["topk_logprobs"] == [[[3, -0.5], [4, -1.5]], [[5, -0.25], [6, -2.0]]]
    assert value["target_prompt_logprobs"] == {
        "data": [-1.0, -2.0, -3.0],
        "dtype": "float32",
        "shape": [3, 5],
        "sparse_crow_indices": [0, 1, 1, 3],
        "sparse_col_indices": [1, 0, 3],
    }
    assert value["prompt_alt_tokens"] == {
        "tokens": {"data": [1, 2], "dtype": "int64", "shape": [1, 2]},
        "logprobs": {"data": [-1.0, -2.0], "dtype": "float32", "shape": [1, 2]},
    }


CSR = {
    "dtype": "int64",
    "shape": [2, 3],
    "data": [1, 2],
    "sparse_crow_indices": [0, 1, 2],
    "sparse_col_indices": [0, 2],
}

MALFORMED = {
    "float ids": (CSR | {"dtype": "float32"}, r"dtype=float32; send int64"),
    "fractions": (CSR | {"data": [1, 2.5]}, r"dtype=int64 with fractions"),
    "no shape": ({"dtype": "int64", "data": [1]}, r"shape=\[\]; send \[tokens of the prompt - 1, K\]"),
    "three dimensions": ({"dtype": "int64", "data": [1], "shape": [1, 1, 1]}, r"shape=\[1, 1, 1\]"),
    "values missing": ({"dtype": "int64", "data": [1], "shape": [2, 3]}, r"shape=\[2, 3\] does not fit 1 values"),
    "negative shape": ({"dtype": "int64", "data": [1], "shape": [-1, -1]}, r"shape=\[-1, -1\] does not fit"),
    "descending rows": (CSR | {"sparse_crow_indices": [0, 2, 1]}, r"crow_indices do not divide 2 values over 2 rows"),
    "rows that wrap": (
        CSR | {"sparse_crow_indices": [0, 2, 0, 2], "shape": [3, 3]},
        r"send 4 ascending offsets from 0 to 2",
    ),
    "rows not from 0": (CSR | {"sparse_crow_indices": [1, 1, 2]}, r"crow_indices"),
    "rows beyond the values": (CSR | {"sparse_crow_indices": [0, 1, 3]}, r"crow_indices"),
    "too few rows": (CSR | {"sparse_crow_indices": [0, 2]}, r"crow_indices"),
    "rows alone": (CSR | {"sparse_col_indices": None}, r"col_indices do not place 2 values"),
    "columns alone": (CSR | {"sparse_crow_indices": None}, r"crow_indices"),
    "column out of range": (CSR | {"sparse_col_indices": [0, 3]}, r"in 3 columns"),
    "negative column": (CSR | {"sparse_col_indices": [-1, 0]}, r"in 3 columns"),
    "cell twice": (
        CSR | {"sparse_crow_indices": [0, 2, 2], "sparse_col_indices": [1, 1]},
        r"duplicate entries in col_indices",
    ),
    "beyond int64": (CSR | {"data": [1, 2**70]}, r"does not fit into 64 bits"),
    "rows beyond int64": (CSR | {"sparse_crow_indices": [0, 1, 2**70]}, r"does not fit into 64 bits"),
    "rows of nothing": (CSR | {"shape": [2**62, 1]}, r"send 4611686018427387905 ascending offsets"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_targets_are_refused_by_name(case):
    value, message = MALFORMED[case]
    with pytest.raises(RequestError, match="target_prompt_logprobs: .*" + message):
        codec.target_matrix(TensorData.model_validate(value))


def test_cells_of_one_row_may_come_in_any_order():
    cells = codec.target_matrix(
        TensorData.model_validate(CSR | {"sparse_crow_indices": [0, 2, 2], "sparse_col_indices": [2, 0]})
    )
    assert cells.rows.tolist() == [0, 0]
