"""A pass that is larger than is read fails in its place, so that nothing waits for a request that will not come."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
import zstandard

from tests.tinker.harness import BASE_MODEL, PROTOBUF, LiveServer, pass_request, wait_until_ready

LIMIT = 2**20
NOISE = np.random.default_rng(0).integers(0, 2**31, LIMIT // 2, np.int32).tolist()
"""Tokens that do not compress: 6 MiB with their targets."""


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LiveServer]:
    with LiveServer(tmp_path_factory.mktemp("server"), max_body_bytes=LIMIT) as server:
        wait_until_ready(server)
        yield server


def sent(server: LiveServer, body: bytes, in_pieces: bool = False, **headers: str):
    content = (body[at : at + 2**16] for at in range(0, len(body), 2**16)) if in_pieces else body
    return server.http.post("/forward_backward", content=content, headers={"Content-Type": PROTOBUF, **headers})


def plain(model: str, tokens: list[int]) -> bytes:
    return pass_request(model, 1, [tokens]).SerializeToString()


def as_json(model: str, tokens: list[int]) -> bytes:
    data = [{"model_input": {"chunks": [{"tokens": tokens, "type": "encoded_text"}]}, "loss_fn_inputs": {}}]
    given = {"data": data, "loss_fn": "cross_entropy"}
    return json.dumps({"model_id": model, "seq_id": 1, "forward_backward_input": given}).encode()


ZSTD = {"Content-Encoding": "zstd"}
BODIES = {
    "protobuf": lambda model: (plain(model, NOISE), {}),
    "zstd": lambda model: (zstandard.compress(plain(model, NOISE)), ZSTD),
    "zstd of less than the limit": lambda model: (zstandard.compress(plain(model, [0] * LIMIT)), ZSTD),
    "zstd that does not say its size": lambda model: (
        zstandard.ZstdCompressor(write_content_size=False).compress(plain(model, [0] * LIMIT)),
        ZSTD,
    ),
    "JSON": lambda model: (as_json(model, NOISE), {"Content-Type": "application/json"}),
}


@pytest.mark.parametrize("in_pieces", [False, True], ids=["with its length", "without its length"])
@pytest.mark.parametrize("kind", BODIES)
def test_the_request_after_a_pass_that_is_too_large_does_not_wait_for_it(server: LiveServer, kind, in_pieces):
    model = server.model()
    body, headers = BODIES[kind](model)
    response = sent(server, body, in_pieces, **headers)
    assert response.status_code == 200, response.text
    step = server.submit_step(model, 2)
    failure = server.failure(response.json()["request_id"])
    assert failure["category"] == "user" and f"{LIMIT} bytes" in failure["error"], failure
    assert "--max-body-bytes" in failure["error"] and "fewer sequences" in failure["error"], failure
    assert "gradients" in server.failure(step)["error"]
    assert server.train(model, 3) == 5


def test_it_is_refused_again_when_its_model_is_brought_back(server: LiveServer):
    model = server.model()
    request_id = sent(server, plain(model, NOISE)).json()["request_id"]
    failure = server.failure(request_id)
    server.failure(server.submit_step(model, 2))
    server.crash()
    server.recover()
    wait_until_ready(server)
    assert server.failure(request_id) == failure
    assert server.train(model, 3) == 5


def test_one_that_does_not_say_at_its_beginning_whose_it_is_is_413_and_says_so(server: LiveServer):
    response = sent(server, pass_request("", 0, [NOISE]).SerializeToString())
    assert response.status_code == 413
    detail = response.json()["detail"]
    assert f"{LIMIT} bytes" in detail and "does not start with its model_id" in detail


def test_one_of_a_model_that_is_not_there_is_404(server: LiveServer):
    assert sent(server, plain("nobody:train:0", NOISE)).status_code == 404


def test_the_stock_sdk_goes_on_after_one(server: LiveServer):
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    trainer = client.create_lora_training_client(BASE_MODEL, rank=4).result()

    def one(tokens: list[int]) -> tinker.Datum:
        targets = {"target_tokens": np.asarray(tokens)}
        return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=targets)

    with pytest.raises(tinker.RequestFailedError, match=f"{LIMIT} bytes") as failure:
        trainer.forward_backward([one([1] * (LIMIT // 4))], "cross_entropy").result()
    assert failure.value.category == "user"
    assert trainer.forward([one([1, 2, 3])], "cross_entropy").result(timeout=60).metrics
