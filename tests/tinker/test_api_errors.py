"""Bodies that make no sense: answered with one readable line and never with a 5xx."""

import json

import httpx
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.tinker.operations.table import OPERATIONS
from tests.tinker.harness import BASE_MODEL, PROTOBUF, LiveServer, pass_request, sample_request, wait_until_ready

QUEUED = sorted({"asample" if name == "sample" else name for name in OPERATIONS})
JSON = {"Content-Type": "application/json"}
JSON_ENDPOINTS = [
    *QUEUED,
    "create_session",
    "session_heartbeat",
    "sessions/nobody/finish",
    "create_sampling_session",
    "get_info",
    "weights_info",
    "retrieve_future",
]
NEVER = {402, 409}


def check(response: httpx.Response) -> None:
    """An acceptance, or an error that the SDK shows to its user."""
    assert response.status_code < 500 and response.status_code not in NEVER, response.text
    if response.status_code >= 400 and response.status_code != 408:
        assert int(response.headers["content-length"]) == len(response.content)
        detail = response.json()["detail"]
        assert detail and "\n" not in detail and len(detail) < 4000


@pytest.mark.parametrize("path", JSON_ENDPOINTS)
@pytest.mark.parametrize(
    "body",
    [
        *[b"", b"{", b"\xff\xfe", b"null", b"[]", b"3", b'"text"', b'{"a": NaN}', b"[" * 100_000, b'{"seq_id": 1e400}'],
        b'{"user_metadata": "\\ud800", "session_id": "\\ud800", "model_id": "\\ud800", "request_id": "\\ud800"}',
    ],
    ids=lambda body: repr(body[:12]),
)
def test_body_that_is_no_json_object_of_the_endpoint_is_a_4xx(server, path, body):
    response = server.http.post(f"/{path}", content=body, headers={"Content-Type": "application/json"})
    check(response)
    assert response.status_code >= 400 or path == "create_session"


def test_missing_field_is_named(server):
    response = server.post("/optim_step", {"seq_id": 1})
    assert (response.status_code, response.json()) == (400, {"detail": "model_id: is required"})


def test_wrong_field_is_named_with_its_value_and_rule(server):
    detail = server.post("/create_session", {"tags": "one"}).json()["detail"]
    assert detail == "tags: 'one': input should be a valid list"


def test_unknown_field_is_named(server):
    detail = server.post("/create_session", {"colour": "red"}).json()["detail"]
    assert detail == "colour: is not a field of this request; remove it"


def test_unknown_endpoint_is_404_and_named(server):
    response = server.post("/create_telepathy", {})
    assert response.status_code == 404
    assert response.json()["detail"].startswith("POST /api/v1/create_telepathy is not served here")


def test_wrong_method_says_so(server):
    response = server.http.get("/create_model")
    check(response)
    assert "GET /api/v1/create_model is not served here" in response.json()["detail"]


@pytest.mark.parametrize("path", ["optim_step", "create_session"])
def test_body_above_the_limit_is_413(server, path):
    response = server.http.post(f"/{path}", content=b" " * (2**20 + 1), headers=JSON)
    assert response.status_code == 413
    assert str(2**20) in response.json()["detail"]


def test_body_above_the_limit_is_413_without_a_declared_length(server):
    response = server.http.post("/optim_step", content=iter([b" " * 2**19] * 3), headers=JSON)
    assert response.status_code == 413


def test_compressed_body_is_bounded_after_decompression(tmp_path):
    bomb = zstandard.compress(b"\0" * 2**24)
    with LiveServer(tmp_path, max_body_bytes=2**20) as server:
        wait_until_ready(server)
        headers = {"Content-Type": PROTOBUF, "Content-Encoding": "zstd"}
        response = server.http.post("/forward_backward", content=bomb, headers=headers)
        assert response.status_code == 400 and str(2**20) in response.json()["detail"]


def test_zstd_body_is_served(server):
    body = zstandard.compress(pass_request(server.model(), 1, [[1, 2]]).SerializeToString())
    headers = {"Content-Type": PROTOBUF, "Content-Encoding": "zstd"}
    response = server.http.post("/forward_backward", content=body, headers=headers)
    assert server.pass_result(response.json()["request_id"]).metrics


def test_parameters_of_a_media_type_change_nothing(server):
    headers = {"Content-Type": "application/json; charset=utf-8"}
    response = server.http.post("/create_session", content=b'{"tags": []}', headers=headers)
    assert response.json()["session_id"]


@pytest.mark.parametrize("path", ["create_session", "optim_step"])
def test_compressed_json_is_refused_by_its_encoding(server, path):
    response = server.http.post(f"/{path}", content=b"{}", headers={**JSON, "Content-Encoding": "gzip"})
    assert response.status_code == 400 and "gzip" in response.json()["detail"]


def test_unknown_content_type_is_400(server):
    response = server.http.post("/forward_backward", content=b"x", headers={"Content-Type": "text/plain"})
    assert response.status_code == 400 and "text/plain" in response.json()["detail"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**4000) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def bodies(server: LiveServer) -> dict[str, dict]:
    """A request of each endpoint that would be accepted, for models that exist."""
    session = server.session()
    model = server.model(session)
    sampler = server.sampler(session, 0, base_model=BASE_MODEL)
    datum = {
        "model_input": {"chunks": [{"tokens": [1, 2]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [1, 2], "dtype": "int64", "shape": [2]}},
    }
    one_pass = {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": {}}
    return {
        "create_model": {
            "session_id": session,
            "model_seq_id": 1,
            "base_model": BASE_MODEL,
            "lora_config": {"rank": 2, "seed": 1, "train_mlp": True},
            "user_metadata": {"a": "b"},
            "optimizer_config": {"type": "adamw"},
        },
        "forward_backward": {"model_id": model, "seq_id": 1, "forward_backward_input": one_pass},
        "forward": {"model_id": model, "seq_id": 2, "forward_input": one_pass},
        "optim_step": {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 0.1, "beta1": 0.9}},
        "save_weights": {"model_id": model, "seq_id": 4, "path": "a", "overwrite": True, "user_metadata": {"a": "b"}},
        "save_weights_for_sampler": {"model_id": model, "seq_id": 5, "path": "b", "kind": "snapshot"},
        "load_weights": {"model_id": model, "seq_id": 6, "path": f"tinker://{model}/weights/a", "optimizer": True},
        "asample": sample_request(sampler, 0, num_samples=2, prompt_logprobs=True),
        "create_session": {"tags": ["a"], "user_metadata": {}, "sdk_version": "1"},
        "session_heartbeat": {"session_id": session},
        f"sessions/{session}/finish": {"reason": {"type": "success"}, "detail": None},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 3, "base_model": BASE_MODEL},
        "get_info": {"model_id": model},
        "weights_info": {"tinker_path": f"tinker://{model}/weights/a"},
        "retrieve_future": {"request_id": "optim_step-0", "allow_metadata_only": True},
    }


def paths_in(value: object) -> list[tuple]:
    """Return the places in a JSON value where something can be replaced."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    found = [()]
    for key, child in items:
        found += [(key, *rest) for rest in paths_in(child)]
    return found


def replaced(value, path: tuple, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_mutated_json_is_never_a_5xx(server, bodies, data):
    path = data.draw(st.sampled_from(sorted(bodies)))
    where = data.draw(st.sampled_from(paths_in(bodies[path])))
    body = replaced(bodies[path], where, data.draw(json_values))
    check(server.http.post(f"/{path}", content=json.dumps(body).encode()))


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.booleans())
def test_mutated_protobuf_is_never_a_5xx(server, at, byte, cut):
    body = bytearray(pass_request("nobody:train:0", 1, [[1, 2], [3, 4]]).SerializeToString())
    body[at % len(body)] = byte
    sent = bytes(body[: at % len(body)] if cut else body)
    check(server.http.post("/forward_backward", content=sent, headers={"Content-Type": PROTOBUF}))


def test_an_error_is_no_longer_than_is_of_use_whatever_was_sent(server):
    model = server.model()
    name = "x" * 100_000
    error = server.failure(server.submit_pass(model, 1, loss_fn=name))["error"]
    assert len(error) < 3000 and error.startswith("loss_fn='xxx") and "known losses: " in error
    response = server.post("/optim_step", {"model_id": name, "seq_id": 1})
    assert response.status_code == 404 and len(response.content) < 3000
    assert "model_id='xxx" in response.json()["detail"]


@pytest.mark.parametrize("path", ["/forward", "/forward_backward"])
def test_json_of_more_than_is_read_fails_in_its_place_and_the_rest_goes_on(server, path):
    model, datums = server.model(), [{"model_input": {"chunks": [{"tokens": [1]}]}, "loss_fn_inputs": {}}] * 40_000
    name = f"{path[1:]}_input"
    request_id = server.ok(path, {name: {"data": datums, "loss_fn": "cross_entropy"}, "model_id": model, "seq_id": 1})[
        "request_id"
    ]
    failure = server.failure(request_id)
    assert failure["category"] == "user" and "send less in one request" in failure["error"]
    step = server.submit_step(model, 2)
    if path == "/forward":
        server.result(step)
    else:
        assert "send less in one request" in server.failure(step)["error"]
