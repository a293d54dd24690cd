"""Bodies that make no sense: answered with one readable line and never with a 5xx."""

import httpx
import pytest

JSON = {"Content-Type": "application/json"}
NEVER = {402, 409}


def check(response: httpx.Response) -> None:
    """An acceptance, or an error that the SDK shows to its user."""
    assert response.status_code < 500 and response.status_code not in NEVER, response.text
    if response.status_code >= 400 and response.status_code != 408:
        assert int(response.headers["content-length"]) == len(response.content)
        detail = response.json()["detail"]
        assert detail and "\n" not in detail and len(detail) < 4000


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
