"""`GET /metrics` against Prometheus' own parser, and what clients have counted."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from skyrl.tinker import metrics
from skyrl.tinker.identity.callers import DisplayNames
from skyrl.tinker.metrics import TenantLabels
from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready

Samples = dict[tuple[str, ...], float]
OPERATOR, ALICE, BOB = "tml-operator", "tml-alice", "tml-bob"


def scraped(server: LiveServer, key: str = "tml-test") -> Samples:
    """Values by (name, values of labels in their order by name)."""
    response = server.http.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {key}", "X-API-Key": ""})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain"), response.text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def until(server: LiveServer, holds: Callable[[Samples], bool]) -> Samples:
    """Scrape until something holds, which the engine may tell a moment later."""
    for _ in range(500):
        found = scraped(server)
        if holds(found):
            return found
        time.sleep(0.01)
    raise AssertionError("the server does not tell it")


def chunks(tokens: list[int]) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": tokens}]}


def test_it_counts_what_clients_count(own_server):
    session = own_server.session()
    model = own_server.model(session)
    for place, length in ((1, 3), (3, 8)):
        own_server.train(model, place, list(range(length)))
    own_server.logprobs(model, 5)
    sampler = own_server.sampler(session, 0, base_model=BASE_MODEL)
    prompts, drawn = [[1, 2, 3], [4, 5]], 0
    for number, prompt in enumerate(prompts):
        drawn += sum(map(len, own_server.sample(sampler, number, prompt=chunks(prompt), num_samples=2)))
    saved = own_server.run("/save_weights", {"model_id": model, "seq_id": 6, "path": "a"})["path"]
    [checkpoint] = own_server.http.get("/checkpoints").json()["checkpoints"]
    found = scraped(own_server)
    assert saved == checkpoint["tinker_path"]
    assert {
        kind: found["skyrl_tokens_total", kind, "local"] for kind in ("trained", "scored", "prompt", "sampled")
    } == {
        "trained": 11,
        "scored": 3,
        "prompt": 5,
        "sampled": drawn,
    }
    counts = {name[1]: value for name, value in found.items() if name[0] == "skyrl_request_seconds_count"}
    assert counts == {
        "create_model": 1,
        "forward_backward": 3,
        "optim_step": 2,
        "sample": 2,
        "save_weights": 1,
    }
    assert found["skyrl_request_wait_seconds_count", "local"] == sum(counts.values())
    assert found["skyrl_requests_waiting", "local"] == found["skyrl_requests_running", "local"] == 0
    assert found["skyrl_stored_bytes", "checkpoint"] == checkpoint["size_bytes"] > 0
    assert found["skyrl_http_responses_total", "POST", "/api/v1/forward_backward", "200"] == 3
    assert found["skyrl_http_request_seconds_count", "GET", "/api/v1/checkpoints"] == 1
    assert not any(name[0] == "skyrl_requests_failed_total" for name in found)
    after = until(own_server, lambda found: found.get(("skyrl_engine_train_micro_batches_total",)) == 6)
    assert after["skyrl_engine_train_dispatches_total",] == 6  # the fake backend computes a pass in two


def test_failures_are_counted_by_whose_they_are(own_server):
    model = own_server.model()
    own_server.failure(own_server.submit_pass(model, 1, loss_fn="no such loss"))
    assert scraped(own_server)["skyrl_requests_failed_total", "user", "forward_backward"] == 1


def test_paths_are_counted_by_their_template_and_unknown_ones_together(own_server):
    session = own_server.session()
    own_server.http.get(f"/sessions/{session}")
    own_server.http.request("OPTIONS", "/no-such-path")
    found = scraped(own_server)
    assert found["skyrl_http_responses_total", "GET", "/api/v1/sessions/{session_id}", "200"] == 1
    assert found["skyrl_http_responses_total", "other", "none", "404"] == 1
    assert session not in str(found)


def test_what_waits_and_what_runs_is_told_while_it_does(own_server):
    first, second = own_server.model(), own_server.model()
    own_server.engine.hold()
    requests = [own_server.submit_pass(first, 1), own_server.submit_pass(second, 1), own_server.submit_step(second, 2)]
    during = until(own_server, lambda found: found.get(("skyrl_requests_running", "local")) == 1)
    assert during["skyrl_requests_waiting", "local"] == 2
    own_server.engine.let_go()
    for request in requests:
        own_server.outcome(request)
    assert scraped(own_server)["skyrl_requests_waiting", "local"] == 0


def test_an_engine_that_ends_is_counted_with_what_brings_its_models_back(own_server):
    model = own_server.model()
    following = own_server.train(model, 1)
    own_server.crash()
    assert scraped(own_server)["skyrl_engine_ready",] == 0
    own_server.recover()
    own_server.train(model, following)
    found = scraped(own_server)
    assert found["skyrl_engine_restarts_total",] == found["skyrl_models_revived_total",] == 1
    assert found["skyrl_requests_replayed_total",] == 3  # the model's creation, its pass and its step
    assert found["skyrl_tokens_total", "trained", "local"] == 6  # those that were done again do not count again
    assert found["skyrl_engine_ready",] == 1


def test_snapshots_are_counted_with_their_bytes(tmp_path):
    with LiveServer(tmp_path, snapshot_every_steps=1) as server:
        wait_until_ready(server)
        server.train(server.model(), 1)
        found = until(server, lambda found: found["skyrl_snapshots_total",] == 1)
        [snapshot] = (tmp_path / "checkpoints").glob("*/snapshots/*")
        assert found["skyrl_snapshot_bytes_total",] == (snapshot / "state.json").stat().st_size


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("guarded")
    with LiveServer(folder, api_keys=[ALICE, BOB], operator_keys=[OPERATOR]) as server:
        wait_until_ready(server)
        for key in (ALICE, BOB, ALICE):
            server.http.headers["X-API-Key"] = key
            server.train(server.model(), 1)
        yield server


def test_an_operator_is_no_tenant(guarded):
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    assert guarded.post("/create_session", body, headers={"X-API-Key": OPERATOR}).status_code == 401


def test_an_operators_key_closes_metrics_of_a_server_without_keys(tmp_path):
    with LiveServer(tmp_path, operator_keys=[OPERATOR]) as server:
        wait_until_ready(server)
        answers = [
            server.http.get(f"{server.url}/metrics", headers={"X-API-Key": key}).status_code
            for key in (OPERATOR, "tml-test")
        ]
        assert answers == [200, 401]
        server.model()


def test_tenants_beyond_so_many_share_a_label(monkeypatch):
    monkeypatch.setattr(metrics, "MOST_TENANTS", 2)
    label = TenantLabels(DisplayNames({"a": "a", "b": "b", "c": "c"}))
    assert [label(tenant) for tenant in ("c", "a", "b", "c", "of before")] == ["c", "a", "other", "c", "other"]


def test_sessions_of_a_server_without_keys_have_one_label():
    label = TenantLabels(DisplayNames({}))
    assert {label(str(number)) for number in range(1000)} == {"local"}
