"""Training requests over HTTP: order, duplicates, refusals in their place, results."""

import json

import pytest

from skyrl.tinker.requests import training
from tests.fakes import POISON
from tests.tinker.harness import BASE_MODEL, PROTOBUF, LiveServer, pass_request


def chunks_out_of_order(server: LiveServer, order: list[int]) -> list[float]:
    """Logprobs after three chunks (which differ) and a step, submitted in this order of seq_ids."""
    model = server.model()
    submit = {seq_id: (lambda s=seq_id: server.submit_pass(model, s, [s, s + 1])) for seq_id in (1, 2, 3)}
    for seq_id in order:
        submit[seq_id]()
    server.result(server.submit_step(model, 4))
    return server.logprobs(model, 5)


def test_chunks_that_arrive_out_of_order_give_the_same_step(server):
    assert chunks_out_of_order(server, [2, 3, 1]) == chunks_out_of_order(server, [1, 2, 3])


def test_chunk_that_waits_for_an_earlier_one_is_pending_with_the_reason(server):
    model = server.model()
    response = server.poll(server.submit_pass(model, 2))
    assert response.status_code == 408
    body = response.json()
    assert (body["type"], body["queue_state"]) == ("try_again", "active")
    assert "seq_id=1" in body["queue_state_reason"]


def test_gradients_of_a_forward_pass_are_not_applied(server):
    model = server.model()
    before = server.logprobs(model, 1)
    server.result(server.submit_step(model, 2))
    assert server.logprobs(model, 3) == before


def test_pass_and_step_change_the_weights(server):
    model = server.model()
    before = server.logprobs(model, 1)
    assert server.logprobs(model, server.train(model, 2)) != before


def test_result_of_a_pass_has_a_logprob_per_token_and_the_loss(server):
    result = server.pass_result(server.submit_pass(server.model(), 1, [1, 2, 3, 4]))
    assert len(result.loss_fn_outputs[0].fields["logprobs"].data) == 4 * 4
    assert "loss:sum" in result.metrics


def test_step_returns_its_metrics_as_json(server):
    model = server.model()
    metrics = server.result(server.submit_step(model, 1, learning_rate=0.25))["metrics"]
    assert metrics["skyrl.ai/learning_rate"] == 0.25


def test_same_seq_id_again_gives_the_same_request(server):
    model = server.model()
    assert server.submit_pass(model, 1) == server.submit_pass(model, 1)


@pytest.mark.parametrize("taken", [0, 1])
def test_seq_id_of_another_kind_of_request_fails_and_says_what_was_there(server, taken):
    model = server.model()
    request = server.submit_pass(model, 1)
    failure = server.failure(server.submit_step(model, taken))
    assert failure["category"] == "user"
    assert f"seq_id={taken}" in failure["error"] and ("create_model", "forward_backward")[taken] in failure["error"]
    server.pass_result(request)
    server.result(server.submit_step(model, 2))


def test_more_bytes_than_may_wait_are_turned_away_until_there_is_room(own_server, monkeypatch):
    model = own_server.model()
    own_server.crash()
    monkeypatch.setattr(training, "MAX_PENDING_BYTES", 2 * training.OVERHEAD_BYTES)
    waiting = own_server.submit_pass(model, 1)
    body = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
    assert own_server.post("/optim_step", body).status_code == 429
    own_server.recover()
    own_server.pass_result(waiting)
    own_server.run("/optim_step", body)


def test_equal_requests_at_the_same_time_give_one_request(server):
    model = server.model()
    ids = server.at_once(*[lambda: server.submit_pass(model, 1)] * 8)
    assert len(set(ids)) == 1


def test_equal_requests_at_the_same_time_take_effect_once(server):
    once, often = server.model(), server.model()
    server.submit_pass(once, 1)
    server.at_once(*[lambda: server.submit_pass(often, 1)] * 8)
    steps = [server.result(server.submit_step(model, 2)) for model in (once, often)]
    assert steps[0] == steps[1]


def test_same_model_number_again_gives_the_same_request(server):
    body = {"session_id": server.session(), "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 4}}
    ids = server.at_once(*[lambda: server.ok("/create_model", body)["request_id"]] * 4)
    assert len(set(ids)) == 1


def test_models_of_a_session_are_numbered_by_the_client(server):
    session = server.session()
    assert server.model(session, 3) == f"{session}:train:3"


def test_seed_is_drawn_when_absent_so_models_differ(server):
    models = [server.model(lora_config={"rank": 4}) for _ in range(2)]
    first, second = (server.logprobs(model, 1) for model in models)
    assert first != second


def test_equal_seeds_give_equal_models(server):
    first, second = (server.logprobs(server.model(), 1) for _ in range(2))
    assert first == second


def test_bad_pass_fails_as_a_future_of_category_user(server):
    failure = server.failure(server.submit_pass(server.model(), 1, [1, 100_000]))
    assert failure["category"] == "user"
    assert "100000" in failure["error"] and "vocabulary" in failure["error"]


def test_step_after_a_failed_chunk_fails_and_says_so(server):
    model = server.model()
    server.submit_pass(model, 1)
    server.submit_pass(model, 2, [1, 100_000])
    failure = server.failure(server.submit_step(model, 3))
    assert failure["category"] == "user"
    assert "100000" in failure["error"]


def test_model_goes_on_after_a_failed_chunk(server):
    model, other = server.model(), server.model()
    server.submit_pass(model, 1, [1, 100_000])
    server.submit_step(model, 2)
    assert server.logprobs(model, server.train(model, 3)) == server.logprobs(other, server.train(other, 1))


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


def test_parameters_of_another_optimizer_are_refused_by_name(server):
    model = server.model()
    body = {"model_id": model, "seq_id": 1, "optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}
    failure = server.failure(server.ok("/optim_step", body)["request_id"])
    assert failure["category"] == "user" and "optimizer_params" in failure["error"]


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


def test_get_info_tells_the_rank(server):
    assert server.ok("/get_info", {"model_id": server.model()})["lora_rank"] == 4


def test_get_info_of_a_model_that_could_not_be_created_is_404(server):
    session = server.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "meta/none", "lora_config": {"rank": 4}}
    server.failure(server.ok("/create_model", body)["request_id"])
    assert server.post("/get_info", {"model_id": f"{session}:train:0"}).status_code == 404


@pytest.mark.parametrize("path", ["/optim_step", "/save_weights", "/load_weights", "/unload_model"])
def test_unknown_model_is_404(server, path):
    body = {"model_id": "nobody:train:0", "seq_id": 1, "path": "tinker://nobody:train:0/weights/a"}
    response = server.post(path, body)
    assert response.status_code == 404
    assert "nobody:train:0" in response.json()["detail"]


def test_unknown_session_is_404(server):
    body = {"session_id": "nobody", "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 4}}
    assert server.post("/create_model", body).status_code == 404


def test_unloaded_model_refuses_further_requests(server):
    model = server.model()
    assert server.run("/unload_model", {"model_id": model})["model_id"] == model
    failure = server.failure(server.submit_step(model, 1))
    assert failure["category"] == "user" and "unloaded" in failure["error"]


def test_an_unload_that_is_sent_again_is_the_same_request(server):
    model = server.model()
    first, second = (server.ok("/unload_model", {"model_id": model})["request_id"] for _ in range(2))
    server.result(first)
    assert first == second == server.ok("/unload_model", {"model_id": model})["request_id"]


def test_unload_comes_after_what_was_submitted_before(server):
    model = server.model()
    request = server.submit_pass(model, 1)
    server.run("/unload_model", {"model_id": model})
    server.pass_result(request)


def test_result_can_be_read_again(server):
    request = server.submit_pass(server.model(), 1)
    assert server.outcome(request).content == server.outcome(request).content


def test_pass_result_is_json_for_clients_that_do_not_accept_protobuf(server):
    request = server.submit_pass(server.model(), 1)
    response = server.outcome(request, accept="application/json")
    tensor = response.json()["loss_fn_outputs"][0]["logprobs"]
    assert (tensor["dtype"], tensor["shape"], len(tensor["data"])) == ("float32", [3], 3)


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


def test_unknown_training_request_is_404(server):
    response = server.poll("forward_backward-nobody")
    assert response.status_code == 404
    assert "forward_backward-nobody" in response.json()["detail"]


def test_protobuf_that_cannot_be_parsed_is_400_with_a_length(server):
    response = server.http.post("/forward_backward", content=b"\xff\xff", headers={"Content-Type": PROTOBUF})
    assert response.status_code == 400
    assert int(response.headers["content-length"]) == len(response.content) > 0
    assert json.loads(response.content)["detail"]


def test_large_pass_is_served(server):
    body = pass_request(server.model(), 1, [[1, 2, 3, 4] * 200] * 40).SerializeToString()
    assert len(body) > 2 * 64 * 1024
    response = server.http.post("/forward_backward", content=body, headers={"Content-Type": PROTOBUF})
    assert server.pass_result(response.json()["request_id"]).loss_fn_outputs[0].num_datums == 40
