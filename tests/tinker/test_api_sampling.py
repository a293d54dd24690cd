"""Samplers and samples over HTTP: versions stay what they are, requests are known by (sampler, seq_id)."""

import pytest

from tests.tinker.harness import BASE_MODEL, LiveServer, pb, sample_request, wait_until_ready
from tests.tinker.test_api_checkpoints import publish, save
from tests.waiting import until


def trained(server: LiveServer) -> tuple[str, str, int]:
    """(session, model, next seq_id)."""
    session = server.session()
    model = server.model(session)
    return session, model, server.train(model, 1)


def snapshot(server: LiveServer, model: str, seq_id: int, number: int, kind: str = "snapshot") -> str:
    request = publish(server, model, seq_id, sampling_session_seq_id=number, kind=kind)
    return server.result(request)["sampling_session_id"]


def test_sampler_of_an_alias_answers_the_canonical_name(server):
    sampler = server.sampler(server.session(), 0, base_model="alias")
    assert server.http.get(f"/samplers/{sampler}").json()["base_model"] == BASE_MODEL


def test_sampler_of_an_unknown_base_model_is_400_and_names_the_served_ones(server):
    body = {"session_id": server.session(), "sampling_session_seq_id": 0, "base_model": "meta/none"}
    response = server.post("/create_sampling_session", body)
    assert response.status_code == 400 and BASE_MODEL in response.json()["detail"]


def test_path_without_its_kind_names_sampler_weights(server):
    session, model, seq_id = trained(server)
    path = server.result(publish(server, model, seq_id, path="a"))["path"]
    long, short = (server.sampler(session, i, model_path=p) for i, p in enumerate([path, f"tinker://{model}/a"]))
    assert server.sample(long, 0) == server.sample(short, 0)


def test_training_checkpoint_is_sampled_too(server):
    session, model, seq_id = trained(server)
    path = server.result(save(server, model, seq_id))["path"]
    expected = server.sample(snapshot(server, model, seq_id + 1, 0), 0)
    assert server.sample(server.sampler(session, 1, model_path=path), 0) == expected


def test_sampler_tells_its_path(server):
    session, model, seq_id = trained(server)
    path = server.result(publish(server, model, seq_id, path="a"))["path"]
    sampler = server.sampler(session, 0, model_path=path)
    answer = server.http.get(f"/samplers/{sampler}").json()
    assert answer == {"sampler_id": sampler, "base_model": BASE_MODEL, "model_path": path}


def test_same_sampler_number_for_something_else_is_refused(server):
    session, model, seq_id = trained(server)
    path = server.result(publish(server, model, seq_id, path="a"))["path"]
    server.sampler(session, 0, base_model=BASE_MODEL)
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    assert server.post("/create_sampling_session", body).status_code == 400


def test_snapshot_outlives_its_model(server):
    _, model, seq_id = trained(server)
    sampler = snapshot(server, model, seq_id, 0)
    before = server.sample(sampler, 0)
    server.run("/unload_model", {"model_id": model})
    assert server.sample(sampler, 1) == before


def test_inflight_samplers_follow_the_newest_inflight_version(server):
    _, model, seq_id = trained(server)
    first = snapshot(server, model, seq_id, 0, "inflight")
    before = server.sample(first, 0)
    seq_id = server.train(model, seq_id + 1)
    second = snapshot(server, model, seq_id, 1, "inflight")
    assert server.sample(first, 1) == server.sample(second, 0) != before


def test_snapshots_do_not_move_inflight_samplers(server):
    _, model, seq_id = trained(server)
    sampler = snapshot(server, model, seq_id, 0, "inflight")
    before = server.sample(sampler, 0)
    snapshot(server, model, server.train(model, seq_id + 1), 1)
    assert server.sample(sampler, 1) == before


def test_answer_has_a_sequence_id_per_sample(server):
    sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
    answer = server.submit_sample(sampler, 0, num_samples=3)
    assert len(set(answer["sample_sequence_ids"])) == 3
    result = pb.SampleResponse.FromString(server.outcome(answer["request_id"]).content)
    assert len(result.sequences) == 3


def test_equal_samples_at_the_same_time_give_one_request(server):
    sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
    answers = server.at_once(*[lambda: server.submit_sample(sampler, 5)["request_id"]] * 8)
    assert len(set(answers)) == 1


def test_seed_is_drawn_when_absent_so_samples_differ(server):
    sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
    params = {"max_tokens": 8, "temperature": 1.0, "stop": []}
    assert server.sample(sampler, 0, sampling_params=params) != server.sample(sampler, 1, sampling_params=params)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompt": {"chunks": [{"tokens": [100_000]}]}}, "100000"),
        ({"prompt": {"chunks": []}}, "prompt is empty"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "image"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"sampling_params": {"max_tokens": 5000}}, "max_tokens=5000"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"seed": 2**63}}, "seed"),
        ({"sampling_params": {"min_p": 0.1}}, "min_p"),
        ({"base_model": BASE_MODEL}, "base_model"),
    ],
)
def test_bad_sample_fails_as_a_future_that_names_the_field(server, options, named):
    sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
    failure = server.failure(server.submit_sample(sampler, 0, **options)["request_id"])
    assert failure["category"] == "user" and named in failure["error"]


def test_a_backend_that_only_trains_refuses_samples_in_a_line_that_names_the_model(tmp_path):
    with LiveServer(tmp_path, backend_config={"samples": False}) as server:
        wait_until_ready(server)
        session, model, seq_id = trained(server)
        path = server.result(publish(server, model, seq_id, path="a"))["path"]
        for number, of in enumerate(({"base_model": BASE_MODEL}, {"model_path": path})):
            sampler = server.sampler(session, number, **of)
            failure = server.failure(server.submit_sample(sampler, 0)["request_id"])
            assert failure["category"] == "user"
            assert failure["error"].startswith(f"base_model={BASE_MODEL}: Fake is trained here and not sampled")


def test_a_sample_that_waits_for_others_says_so_and_one_that_runs_does_not(tmp_path):
    options = {"burst_s": 0.005, "rows": 1, "max_context_length": 10**9}
    with LiveServer(tmp_path, backend_config=options) as server:
        wait_until_ready(server)
        sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
        endless = {"max_tokens": 10**8, "temperature": 0.0, "stop": []}
        runs, waits = (server.submit_sample(sampler, i, sampling_params=endless)["request_id"] for i in range(2))
        until(lambda: server.poll(waits).json()["queue_state"] == "paused_capacity", "one sample waits for the other")
        assert server.poll(waits).json()["queue_state_reason"] == "waiting behind 1 samples that run"
        assert server.poll(runs).json()["queue_state"] == "active"
        for request_id in (runs, waits):
            server.post("/cancel_future", {"request_id": request_id})


def test_a_prompt_far_above_the_context_is_refused_by_its_size(server):
    prompt = {"chunks": [{"tokens": [1] * 2**17}] * 5}
    response = server.post(
        "/asample", sample_request(server.sampler(server.session(), 1, base_model=BASE_MODEL), 1, prompt=prompt)
    )
    assert response.status_code == 400
    assert response.json()["detail"] == (
        "tokens: more than the 1048576 bytes that a prompt of the model's context of 1024 tokens may take; "
        "send a shorter prompt"
    )
