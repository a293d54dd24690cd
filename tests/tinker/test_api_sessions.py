"""Sessions, keys and the endpoints that a client asks first."""

import pytest

from skyrl.tinker.http.routes import losses
from tests.tinker.harness import BASE_MODEL, LiveServer, loss_request
from tests.tinker.in_process import InProcessServer
from tests.tinker.test_api_checkpoints import save


def switch_to_b(server: LiveServer) -> None:
    server.http.headers["X-API-Key"] = "tml-b"


def test_session_with_much_metadata_is_refused(server):
    response = server.post("/create_session", {"user_metadata": {"a": "x" * 2**16}})
    assert response.status_code == 413 and "at most 65536" in response.text


def test_health_is_503_with_progress_while_the_engine_loads(tmp_path):
    with LiveServer(tmp_path, backend="held back") as server:
        response = server.http.get("/healthz")
        assert response.status_code == 503
        assert response.json() == {"status": "starting", "detail": "the engine is not ready: starting"}


def test_request_that_needs_the_model_is_503_while_the_engine_loads(tmp_path):
    with LiveServer(tmp_path, backend="held back") as server:
        response = server.http.get("/get_server_capabilities")
        assert response.status_code == 503
        assert "starting the engine" in response.json()["detail"]


@pytest.mark.timeout(30)
def test_request_that_waits_for_the_model_is_503_as_soon_as_the_server_is_to_stop(tmp_path):
    with InProcessServer(tmp_path, backend="held back", long_poll_s=40) as server:
        server.app.state.server.release_waiters(at_once=False)
        assert server.request("GET", "/get_server_capabilities").status_code == 503


def test_session_can_be_made_while_the_engine_loads(tmp_path):
    with LiveServer(tmp_path, backend="held back") as server:
        assert server.session()


def test_client_config_promises_only_what_is_served(server):
    flags = server.ok("/client/config", {"sdk_version": "0.38.0"})
    assert {name for name, value in flags.items() if value is True} == {
        "custom_loss_server_side",
        "pjwt_auth_enabled",
        "parallel_fwdbwd_chunks",
        "proto_write_fwdbwd",
        "fwd_via_fwdbwd",
        "create_model_via_load_weights",
        "sample_join_sampling_session",
        "sample_use_retrieve_futures",
    }


def test_dynamic_config_lets_clients_cancel_samples(server):
    assert server.ok("/client/dynamic_config", {"sdk_version": "0.38.0"})["sample_cancel_enabled"] is True


def test_capabilities_list_the_model_and_its_aliases(server):
    models = server.http.get("/get_server_capabilities").json()["supported_models"]
    assert [model["model_name"] for model in models] == [BASE_MODEL, "alias"]
    assert {model["max_context_length"] for model in models} == {1024}


@pytest.mark.parametrize("body", [b"", b"{", b'{"events": 3}'])
def test_telemetry_is_always_accepted(server, body):
    response = server.http.post("/telemetry", content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()) == (200, {"status": "accepted"})


def finish(server: LiveServer, session: str, reason: str = "success"):
    return server.post(f"/sessions/{session}/finish", {"reason": {"type": reason}, "detail": None})


def test_heartbeat_of_a_finished_session_is_410(server):
    session = server.session()
    assert finish(server, session).status_code == 204
    assert server.post("/session_heartbeat", {"session_id": session}).status_code == 410


def test_what_a_client_says_of_a_sessions_end_is_in_the_log(server, caplog):
    session, reason = server.session(), {"reason": {"type": "errored"}, "detail": "CUDA\nerror " + "x" * 5000}
    with caplog.at_level("INFO"):
        assert server.post(f"/sessions/{session}/finish", reason).status_code == 204
    [line] = [record.message for record in caplog.records if "was finished" in record.message]
    assert line.startswith(f"session {session} was finished: CUDA error xxx") and len(line) < 1100


def test_session_may_be_finished_twice(server):
    session = server.session()
    finish(server, session)
    assert finish(server, session, "errored").status_code == 204


def test_training_of_a_finished_session_is_refused(server):
    session = server.session()
    model = server.model(session)
    finish(server, session)
    failure = server.failure(server.submit_pass(model, 1))
    assert failure["category"] == "user" and "finished" in failure["error"]


def test_sampling_of_a_finished_session_is_refused(server):
    session = server.session()
    sampler = server.sampler(session, 0, base_model=BASE_MODEL)
    finish(server, session)
    failure = server.failure(server.submit_sample(sampler, 0)["request_id"])
    assert failure["category"] == "user" and "finished" in failure["error"]


def test_new_model_of_a_finished_session_is_refused(server):
    session = server.session()
    finish(server, session)
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 4}}
    assert "finished" in server.failure(server.ok("/create_model", body)["request_id"])["error"]


def test_checkpoint_of_a_finished_session_can_be_loaded_by_another(server):
    session = server.session()
    path = server.result(save(server, server.model(session), 1))["path"]
    finish(server, session)
    server.run("/load_weights", {"session_id": server.session(), "model_seq_id": 0, "path": path})


def test_custom_losses_are_counted_for_all_sessions_of_a_key(as_a, monkeypatch):
    monkeypatch.setattr(losses, "MAX_LOSSES", 2)
    for _ in range(2):
        as_a.ok("/create_custom_loss", loss_request(as_a.session()))
    refused = as_a.post("/create_custom_loss", loss_request(as_a.session()))
    assert refused.status_code == 400 and "your sessions have 2 custom losses" in refused.text
    switch_to_b(as_a)
    as_a.ok("/create_custom_loss", loss_request(as_a.session()))
