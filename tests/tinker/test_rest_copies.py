"""Copies of checkpoints over HTTP."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyrl.utils.files.stored_folders import copy_stored
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.test_api_checkpoints import load_as_new, publish, save
from tests.tinker.test_rest_checkpoints import get, listed, saved, url


def copy(server: LiveServer, path: str, key: str | None = None, **body):
    destination = body or {"destination_project_id": "archive"}
    headers = {"X-Idempotency-Key": key} if key else {}
    return server.post("/copy_weights", {"source_path": path, **destination}, headers=headers)


def copied(server: LiveServer, path: str, key: str | None = None, **body) -> str:
    response = copy(server, path, key, **body)
    assert response.status_code == 200, response.text
    return response.json()["tinker_path"]


def test_copy_trains_on_as_the_source_would(server):
    model = server.model()
    server.train(model, 1)
    before = server.logprobs(model, 3)
    path = copied(server, server.result(save(server, model, 4))["path"])
    assert server.logprobs(server.result(load_as_new(server, path))["model_id"], 1) == before


def test_copy_keeps_kind_and_name_in_a_run_of_its_own(server):
    path = server.result(publish(server, server.model(), 1, path="a"))["path"]
    copy_path = copied(server, path)
    assert copy_path.endswith("/sampler_weights/a") and copy_path != path
    session = server.session()
    samplers = [server.sampler(session, number, model_path=model) for number, model in enumerate([path, copy_path])]
    assert server.sample(samplers[0], 0) == server.sample(samplers[1], 0)


def test_copy_outlives_its_source(server):
    path = saved(server)
    copy_path = copied(server, path)
    server.http.delete(url(path))
    assert server.result(load_as_new(server, copy_path))["model_id"]


def test_deleting_a_copy_leaves_the_source(server):
    path = saved(server)
    server.http.delete(url(copied(server, path)))
    assert server.result(load_as_new(server, path))["model_id"]


def test_copy_takes_the_metadata_but_not_the_expiry_of_its_source(server):
    path = saved(server, user_metadata={"a": "b"}, ttl_seconds=3600)
    entry = listed(server, copied(server, path))
    assert entry["user_metadata"] == {"a": "b"} and "expires_at" not in entry


def test_copy_lands_in_its_project(own_server):
    path = copied(own_server, saved(own_server))
    (run,) = get(own_server, "/training_runs", project_id="archive")["training_runs"]
    assert path.startswith(f"tinker://{run['training_run_id']}/")


def test_run_of_a_copy_cannot_be_trained(server):
    model = copied(server, saved(server)).split("/")[2]
    failure = server.failure(server.submit_pass(model, 1))
    assert failure["category"] == "user" and "copy" in failure["error"]


def test_request_that_is_sent_again_makes_no_second_copy(server):
    path = saved(server)
    assert copied(server, path, key="k1") == copied(server, path, key="k1")
    assert copied(server, path, key="k2") != copied(server, path, key="k1")


def test_requests_sent_at_once_make_one_copy(own_server):
    path = saved(own_server)
    paths = own_server.at_once(*[lambda: copied(own_server, path, key="k")] * 4)
    assert len(set(paths)) == 1
    assert get(own_server, "/training_runs", project_id="archive")["cursor"]["total_count"] == 1


def test_copy_into_a_session_takes_its_place_there(server):
    path, session = saved(server), server.session()
    body = {"session_id": session, "model_seq_id": 3}
    assert copied(server, path, **body) == f"tinker://{session}:train:3/weights/a"
    assert copied(server, path, **body) == f"tinker://{session}:train:3/weights/a"
    failure = server.failure(server.ok("/load_weights", {**body, "path": path})["request_id"])
    assert failure["category"] == "user" and "copy_weights" in failure["error"]


def test_place_of_a_model_is_not_given_to_a_copy(server):
    path, session = saved(server), server.session()
    server.model(session, 0)
    response = copy(server, path, session_id=session, model_seq_id=0)
    assert response.status_code == 400 and "model_seq_id=0" in response.json()["detail"]


def test_copy_without_a_destination_is_400(server):
    assert server.post("/copy_weights", {"source_path": saved(server)}).status_code == 400


def test_checkpoint_of_another_key_can_be_copied_with_that_key(tmp_path):
    with LiveServer(tmp_path, api_keys=["tml-a", "tml-b"]) as server:
        wait_until_ready(server)
        server.http.headers["X-API-Key"] = "tml-a"
        path = saved(server)
        server.http.headers["X-API-Key"] = "tml-b"
        body = {"source_path": path, "destination_project_id": "p"}
        header = {"X-Tinker-Weights-Access-Token": "tml-a"}
        path = server.ok("/copy_weights", body, headers=header)["tinker_path"]
        assert listed(server, path)


@pytest.mark.full
def test_copy_survives_a_restart(tmp_path):
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        path = copied(server, saved(server), key="k")
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        assert server.result(load_as_new(server, path))["model_id"]
        assert copied(server, path, key="k") == path


@pytest.mark.full
def test_a_copy_waits_for_no_other_copy(tmp_path, monkeypatch):
    """However long that takes to write."""
    answer, begun = threading.Event(), threading.Event()

    def slow(source: str, target: str) -> None:
        if not begun.is_set():
            begun.set()
            assert answer.wait(60)
        copy_stored(source, target)

    monkeypatch.setattr("skyrl.tinker.operations.copy_weights.copy_stored", slow)
    with LiveServer(tmp_path, api_keys=["tml-test", "tml-other"]) as server, ThreadPoolExecutor(1) as pool:
        wait_until_ready(server)
        first = pool.submit(copy, server, saved(server))
        assert begun.wait(30)
        server.http.headers["X-API-Key"] = "tml-other"
        assert copy(server, saved(server)).status_code == 200
        assert not first.done()
        answer.set()
        assert first.result(30).status_code == 200
