"""The event loop goes on while it is asked for, or sent, a lot of JSON."""

import json
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from skyrl.tinker.http import openapi
from skyrl.tinker.results import PROTOBUF, Answer
from skyrl.tinker.wire import codec, strict_json
from skyrl.types import ForwardBackwardOutput
from tests.tinker.harness import BASE_MODEL, sample_request
from tests.tinker.stalls import Meanwhile, Stalls

pytestmark = pytest.mark.full

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


def test_the_openapi_document_is_made_once_beside_the_event_loop_for_a_crowd(server: Stalls, monkeypatch):
    threads, schema = [], openapi.ErrorDetail.model_json_schema

    def noted() -> dict:  # part of each document
        threads.append(threading.get_ident())
        return schema()

    monkeypatch.setattr(openapi.ErrorDetail, "model_json_schema", noted)
    seen = server.meanwhile(*(server.asked("/openapi.json") for _ in range(20)))
    assert len(threads) == 1 and threads != [threading.get_ident()]
    assert {response.content for response in seen.responses} == {strict_json.dumps(server.app.openapi())}


def tokens(count: int) -> list[int]:
    return [*np.random.default_rng(count).integers(0, 500, count - 1).tolist(), UNKNOWN]


def test_a_large_sample_does_not_stop_the_others(server: Stalls):
    """A prompt of 30 MiB, which the model's context has room for."""
    sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
    prompt = {"chunks": [{"tokens": tokens(CONTEXT * 3 // 4)}]}
    body = json.dumps(sample_request(sampler, 1, prompt=prompt)).encode()
    assert len(body) > 28 * 2**20
    seen = server.meanwhile(server.sent("/asample", body))
    assert_others_went_on(seen)
    outcome = server.outcome(seen.responses[0].json()["request_id"]).json()
    assert f"={UNKNOWN} is outside the vocabulary" in outcome["error"]
