"""The event loop goes on while it is asked for, or sent, a lot of JSON."""

import json
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import zstandard

from skyrl.tinker.http import openapi
from skyrl.tinker.results import PROTOBUF, Answer
from skyrl.tinker.wire import codec, strict_json
from skyrl.types import ForwardBackwardOutput, GeneratedSequence, SampleOutput
from tests.tinker.harness import pass_request, sample_request
from tests.tinker.stalls import Meanwhile, Stalls, length_delimited

CONTEXT = 2**23
UNKNOWN = 10**6
"""A token that is in no vocabulary, so that the engine, which is a thread here, has nothing to do with it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Stalls]:
    with Stalls(tmp_path_factory.mktemp("server"), backend_config={"max_context_length": CONTEXT}) as server:
        while server.engine.state != "ready":
            server.let_it_work(0.001)
        yield server


def assert_others_went_on(seen: Meanwhile) -> None:
    assert seen.longest_stall_s < seen.allowed_s
    assert max(seen.heartbeats_s) < 2 * seen.allowed_s


def numbers(count: int) -> np.ndarray:
    return -np.random.default_rng(count).random(count, np.float32)


def test_a_large_result_as_json_does_not_stop_the_others(server: Stalls):
    """8 MiB, half of them in one array."""
    outputs = [{"logprobs": numbers(count)} for count in [2**20, *[2**13] * 128]]
    request_id = "forward_backward-1"
    server.answer(request_id, Answer(codec.encode_forward_backward(ForwardBackwardOutput(outputs, {})), PROTOBUF))
    seen = server.meanwhile(server.sent("/retrieve_future", json={"request_id": request_id}))
    assert_others_went_on(seen)
    read = json.loads(seen.responses[0].content)["loss_fn_outputs"]
    for datum, output in zip(read, outputs, strict=True):
        np.testing.assert_array_equal(np.float32(datum["logprobs"]["data"]), output["logprobs"])


def test_a_table_of_alternatives_as_json_does_not_stop_the_others(server: Stalls):
    """2^19 cells are 4 MiB."""
    k = 64
    ids = np.arange(2**19, dtype=np.int32).reshape(-1, k)
    logprobs = numbers(2**19).reshape(-1, k)
    sequence = GeneratedSequence(ids[:, 0].copy(), logprobs[:, 0].copy(), "stop", (ids, logprobs))
    server.answer("sample-1", Answer(codec.encode_sample(SampleOutput([sequence])), PROTOBUF))
    seen = server.meanwhile(server.sent("/retrieve_future", json={"request_id": "sample-1"}))
    assert_others_went_on(seen)
    table = json.loads(seen.responses[0].content)["sequences"][0]["topk_logprobs"]
    np.testing.assert_array_equal(np.int32([[cell[0] for cell in row] for row in table]), ids)
    np.testing.assert_array_equal(np.float32([[cell[1] for cell in row] for row in table]), logprobs)


def test_the_openapi_document_is_made_once_beside_the_event_loop_for_a_crowd(server: Stalls, monkeypatch):
    threads, schema = [], openapi.ErrorDetail.model_json_schema

    def noted() -> dict:  # part of each document
        threads.append(threading.get_ident())
        return schema()

    monkeypatch.setattr(openapi.ErrorDetail, "model_json_schema", noted)
    seen = server.meanwhile(*(server.asked("/openapi.json") for _ in range(20)))
    assert len(threads) == 1 and threads != [threading.get_ident()]
    assert {response.content for response in seen.responses} == {strict_json.dumps(server.app.openapi())}


def test_a_shape_of_very_many_dimensions_does_not_stop_the_others(server: Stalls):
    """16 MiB in a kilobyte, which a parser and a product of them take seconds for."""
    tensor = length_delimited(1, bytes(8)) + b"\x18\x02" + length_delimited(4, b"\x01" * 2**24)
    entry = length_delimited(1, b"target_tokens") + length_delimited(2, tensor)
    datum = pass_request(server.model(), 1, []).SerializeToString() + length_delimited(3, length_delimited(2, entry))
    body = zstandard.compress(datum)
    headers = {"Content-Type": PROTOBUF, "Content-Encoding": "zstd"}
    seen = server.meanwhile(server.sent("/forward_backward", body, headers=headers))
    assert_others_went_on(seen)
    outcome = server.outcome(seen.responses[0].json()["request_id"]).json()
    assert outcome["category"] == "user" and "parts; send fewer" in outcome["error"]


def tokens(count: int) -> list[int]:
    return [*np.random.default_rng(count).integers(0, 500, count - 1).tolist(), UNKNOWN]


def test_a_large_sample_does_not_stop_the_others(server: Stalls):
    """A prompt of 30 MiB, which the model's context has room for."""
    body = json.dumps(
        sample_request(server.sampler(), 1, prompt={"chunks": [{"tokens": tokens(CONTEXT * 3 // 4)}]})
    ).encode()
    assert len(body) > 28 * 2**20
    seen = server.meanwhile(server.sent("/asample", body))
    assert_others_went_on(seen)
    outcome = server.outcome(seen.responses[0].json()["request_id"]).json()
    assert f"={UNKNOWN} is outside the vocabulary" in outcome["error"]


def test_a_large_pass_as_json_does_not_stop_the_others(server: Stalls):
    """As clients before 0.25 send it: 30 MiB in 512 datums."""
    values = {"data": [0.123456789] * 2000, "dtype": "float32", "shape": [2000]}
    datum = {
        "model_input": {"chunks": [{"tokens": tokens(2000)}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": tokens(2000), "dtype": "int64", "shape": [2000]},
            "weights": values,
        },
    }
    body = {
        "model_id": server.model(),
        "seq_id": 1,
        "forward_input": {"data": [datum] * 512, "loss_fn": "cross_entropy"},
    }
    seen = server.meanwhile(server.sent("/forward", json.dumps(body).encode()))
    assert_others_went_on(seen)
    outcome = server.outcome(seen.responses[0].json()["request_id"]).json()
    assert f"={UNKNOWN} is outside the vocabulary" in outcome["error"]
