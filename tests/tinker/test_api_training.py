"""Training requests over HTTP: order, duplicates, refusals in their place, results."""

import pytest

from tests.fakes import POISON
from tests.tinker.harness import BASE_MODEL


def test_chunk_that_waits_for_an_earlier_one_is_pending_with_the_reason(server):
    model = server.model()
    response = server.poll(server.submit_pass(model, 2))
    assert response.status_code == 408
    body = response.json()
    assert (body["type"], body["queue_state"]) == ("try_again", "active")
    assert "seq_id=1" in body["queue_state_reason"]


@pytest.mark.parametrize("taken", [0, 1])
def test_seq_id_of_another_kind_of_request_fails_and_says_what_was_there(server, taken):
    model = server.model()
    request = server.submit_pass(model, 1)
    failure = server.failure(server.submit_step(model, taken))
    assert failure["category"] == "user"
    assert f"seq_id={taken}" in failure["error"] and ("create_model", "forward_backward")[taken] in failure["error"]
    server.pass_result(request)
    server.result(server.submit_step(model, 2))


def test_same_model_number_again_gives_the_same_request(server):
    body = {"session_id": server.session(), "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 4}}
    ids = server.at_once(*[lambda: server.ok("/create_model", body)["request_id"]] * 4)
    assert len(set(ids)) == 1


def test_seed_is_drawn_when_absent_so_models_differ(server):
    models = [server.model(lora_config={"rank": 4}) for _ in range(2)]
    first, second = (server.logprobs(model, 1) for model in models)
    assert first != second


def test_step_after_a_failed_chunk_fails_and_says_so(server):
    model = server.model()
    server.submit_pass(model, 1)
    server.submit_pass(model, 2, [1, 100_000])
    failure = server.failure(server.submit_step(model, 3))
    assert failure["category"] == "user"
    assert "100000" in failure["error"]


def test_json_body_with_a_bad_field_fails_in_its_place(server):
    model = server.model()
    body = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": "fast"}}
    failure = server.failure(server.ok("/optim_step", body)["request_id"])
    assert failure["category"] == "user"
    assert "adam_params.learning_rate" in failure["error"] and "fast" in failure["error"]
    server.train(model, 2)


@pytest.mark.parametrize("field", ["learning_rate", "weight_decay", "grad_clip_norm"])
def test_a_number_that_float32_cannot_hold_is_refused(server, field):
    model = server.model()
    body = {"model_id": model, "seq_id": 1, "adam_params": {field: 1e300}}
    failure = server.failure(server.ok("/optim_step", body)["request_id"])
    assert failure["category"] == "user" and f"adam_params.{field}" in failure["error"] and "1e+300" in failure["error"]
    assert server.ok("/optim_step", body | {"seq_id": 2, "adam_params": {field: 3e38}})


def test_internal_error_is_of_category_server_without_details(server):
    failure = server.failure(server.submit_pass(server.model(), 1, [1, POISON]))
    assert failure["category"] == "server"
    assert "internal error" in failure["error"] and "poisoned" not in failure["error"]


def test_unknown_base_model_fails_and_names_the_served_ones(server):
    body = {"session_id": server.session(), "model_seq_id": 0, "base_model": "meta/none", "lora_config": {"rank": 4}}
    failure = server.failure(server.ok("/create_model", body)["request_id"])
    assert failure["category"] == "user"
    assert "meta/none" in failure["error"] and BASE_MODEL in failure["error"] and "alias" in failure["error"]


def test_rank_above_the_largest_fails_with_the_limit(server):
    body = {"session_id": server.session(), "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 65}}
    failure = server.failure(server.ok("/create_model", body)["request_id"])
    assert "rank=65" in failure["error"] and "64" in failure["error"]


def test_alias_trains_under_the_canonical_name(server):
    model = server.model(base_model="alias")
    info = server.ok("/get_info", {"model_id": model})
    assert info["model_data"]["model_name"] == info["model_name"] == BASE_MODEL


def test_get_info_of_a_model_that_could_not_be_created_is_404(server):
    session = server.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "meta/none", "lora_config": {"rank": 4}}
    server.failure(server.ok("/create_model", body)["request_id"])
    assert server.post("/get_info", {"model_id": f"{session}:train:0"}).status_code == 404


def test_an_unload_that_is_sent_again_is_the_same_request(server):
    model = server.model()
    first, second = (server.ok("/unload_model", {"model_id": model})["request_id"] for _ in range(2))
    server.result(first)
    assert first == second == server.ok("/unload_model", {"model_id": model})["request_id"]


def test_pass_as_json_gives_the_same_result_as_protobuf(server):
    model = server.model()
    datum = {
        "model_input": {"chunks": [{"tokens": [1, 2, 3]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [1, 2, 3], "dtype": "int64"}},
    }
    given = {"data": [datum], "loss_fn": "cross_entropy"}
    as_json = server.ok("/forward", {"model_id": model, "seq_id": 1, "forward_input": given})["request_id"]
    expected = server.logprobs(model, 2)
    result = server.outcome(as_json, accept="application/json").json()
    assert result["loss_fn_outputs"][0]["logprobs"]["data"] == pytest.approx(expected)
