"""Runs and checkpoints over HTTP: listed, shared between keys, expiring, deleted."""

import time
from datetime import UTC, datetime

import pytest

from skyrl.tinker.database.queries.checkpoint_rows import find_checkpoint_or_expired
from skyrl.tinker.identity.ids import TinkerPath
from tests.tinker.harness import BASE_MODEL, LiveServer
from tests.tinker.test_api_checkpoints import load_as_new, publish, save


def switch_to(server: LiveServer, key: str) -> None:
    server.http.headers["X-API-Key"] = key


def url(path: str, action: str = "") -> str:
    """The URL of the checkpoint at a tinker:// path."""
    model, checkpoint_id = path.removeprefix("tinker://").split("/", 1)
    return f"/training_runs/{model}/checkpoints/{checkpoint_id}{action}"


def saved(server: LiveServer, name: str = "a", **options) -> str:
    """The path of a new model's training checkpoint."""
    return server.result(save(server, server.model(), 1, name, **options))["path"]


def published(server: LiveServer, name: str = "a", **options) -> str:
    """The path of a new model's sampler checkpoint."""
    return server.result(publish(server, server.model(), 1, path=name, **options))["path"]


def get(server: LiveServer, path: str, **params):
    response = server.http.get(path, params=params)
    assert response.status_code == 200, response.text
    return response.json()


def listed(server: LiveServer, path: str) -> dict | None:
    """The entry of a checkpoint in its run's list."""
    model = path.removeprefix("tinker://").split("/")[0]
    entries = get(server, f"/training_runs/{model}/checkpoints")["checkpoints"]
    return next((entry for entry in entries if entry["tinker_path"] == path), None)


def expire(server: LiveServer, path: str) -> None:
    """Let the time to live of a checkpoint be over."""

    def change(session) -> None:
        find_checkpoint_or_expired(session, TinkerPath.parse("path", path)).expires_at = time.time() - 1

    server.on_loop(server.app.state.server.service.database.write(change))


# -- lists ------------------------------------------------------------------------------------------------------------


def test_checkpoint_entry_says_what_was_saved(server):
    before = datetime.now(UTC)
    path = saved(server, "x", user_metadata={"step": "3"})
    entry = listed(server, path)
    assert entry is not None
    assert (entry["checkpoint_id"], entry["checkpoint_type"]) == ("weights/x", "training")
    assert (entry["public"], entry["user_metadata"]) == (False, {"step": "3"})
    assert entry["base_model"] == BASE_MODEL
    assert before <= datetime.fromisoformat(entry["time"]) <= datetime.now(UTC)
    assert "expires_at" not in entry


def test_size_of_a_checkpoint_is_that_of_its_files(server):
    path = saved(server)
    (folder,) = (server.folder / "checkpoints" / path.split("/")[2].replace(":", "-") / "weights").iterdir()
    sizes = [file.stat().st_size for file in folder.iterdir() if file.name != "manifest.json"]
    assert listed(server, path)["size_bytes"] == sum(sizes) > 0


@pytest.mark.full
def test_checkpoints_are_listed_newest_first_in_pages(own_server):
    paths = [saved(own_server, name) for name in "abc"]
    first = get(own_server, "/checkpoints", limit=2)
    second = get(own_server, "/checkpoints", limit=2, offset=2)
    assert [entry["tinker_path"] for entry in first["checkpoints"] + second["checkpoints"]] == paths[::-1]
    assert second["cursor"] == {"offset": 2, "limit": 2, "total_count": 3}


def test_runs_are_listed_newest_first_in_pages(own_server):
    models = [own_server.model() for _ in range(3)]
    pages = [get(own_server, "/training_runs", limit=2, offset=offset) for offset in (0, 2)]
    assert [run["training_run_id"] for page in pages for run in page["training_runs"]] == models[::-1]
    assert [page["cursor"]["total_count"] for page in pages] == [3, 3]


def test_run_shows_its_newest_checkpoint_of_each_kind(server):
    model = server.model(user_metadata={"renderer_name": "qwen3", "n": 3})
    for seq_id, name in enumerate("ab", 1):
        server.result(save(server, model, seq_id, name))
    sampler = server.result(publish(server, model, 3, path="s"))["path"]
    run = get(server, f"/training_runs/{model}")
    assert run["last_checkpoint"]["tinker_path"] == f"tinker://{model}/weights/b"
    assert run["last_sampler_checkpoint"]["tinker_path"] == sampler
    assert (run["base_model"], run["is_lora"], run["lora_rank"], run["corrupted"]) == (BASE_MODEL, True, 4, False)
    assert run["user_metadata"] == {"renderer_name": "qwen3", "n": "3"}


def test_last_request_of_a_run_moves_on(server):
    model = server.model()
    before = datetime.now(UTC)
    server.train(model, 1)
    run = get(server, f"/training_runs/{model}")
    assert before <= datetime.fromisoformat(run["last_request_time"]) <= datetime.now(UTC)


def test_run_that_could_not_be_created_is_not_listed(own_server):
    body = {"session_id": own_server.session(), "model_seq_id": 0, "base_model": "other"}
    own_server.failure(own_server.ok("/create_model", body)["request_id"])
    assert get(own_server, "/training_runs")["training_runs"] == []


@pytest.mark.parametrize(
    "params", [{"limit": -1}, {"limit": "x"}, {"offset": -1}, {"offset": 2**70}, {"access_scope": "all"}]
)
def test_bad_parameter_of_a_list_is_400_and_named(server, params):
    response = server.http.get("/training_runs", params=params)
    assert response.status_code == 400
    assert response.json()["detail"].startswith(next(iter(params)))


# -- deleting ---------------------------------------------------------------------------------------------------------


def test_deleted_checkpoint_is_gone_with_its_files(own_server):
    path = saved(own_server)
    assert own_server.http.delete(url(path)).status_code == 204
    assert listed(own_server, path) is None
    assert own_server.failure(load_as_new(own_server, path))["category"] == "user"
    assert not list((own_server.folder / "checkpoints").glob("*/weights/*"))


def test_name_of_a_deleted_checkpoint_can_be_used_again(server):
    model = server.model()
    path = server.result(save(server, model, 1))["path"]
    server.http.delete(url(path))
    assert server.result(save(server, model, 2))["path"] == path


def test_deleting_twice_is_no_error_because_the_answer_to_the_first_may_have_been_lost(server):
    for path in (saved(server), published(server)):
        assert server.http.delete(url(path)).status_code == 204
        assert server.http.delete(url(path)).status_code == 204


def test_deleting_what_never_was_is_404(server):
    run = saved(server).split("/")[2]
    assert server.http.delete(f"/training_runs/{run}/checkpoints/weights/misspelled").status_code == 404
    assert server.http.delete(f"/training_runs/{run}/checkpoints/sampler_weights/a").status_code == 404


def test_checkpoint_that_another_key_has_deleted_is_unknown(as_a):
    path = saved(as_a)
    as_a.http.delete(url(path))
    switch_to(as_a, "tml-b")
    assert as_a.http.delete(url(path)).status_code == 404


def test_sampler_of_a_deleted_checkpoint_fails_by_name(server):
    path = published(server)
    sampler = server.sampler(server.session(), 0, model_path=path)
    server.sample(sampler, 0)
    server.http.delete(url(path))
    failure = server.failure(server.submit_sample(sampler, 1)["request_id"])
    assert failure["category"] == "user"
    assert path in failure["error"] and "deleted" in failure["error"]


def test_deleting_leaves_other_samplers_of_the_model_alone(server):
    model = server.model()
    session = model.split(":")[0]
    path = server.result(publish(server, model, 1, path="a"))["path"]
    other = server.result(publish(server, model, 2, sampling_session_seq_id=0))["sampling_session_id"]
    server.http.delete(url(path))
    assert server.sample(other, 0)
    assert server.sample(server.sampler(session, 1, base_model=BASE_MODEL), 0)


def test_checkpoint_kind_that_does_not_exist_is_400(server):
    assert server.http.delete("/training_runs/m/checkpoints/wights/a").status_code == 400


# -- time to live -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [saved, published])
def test_time_to_live_of_a_save_is_shown(server, write):
    earliest = time.time() + 7200
    path = write(server, ttl_seconds=7200)
    shown = datetime.fromisoformat(listed(server, path)["expires_at"]).timestamp()
    assert earliest <= shown <= time.time() + 7200


@pytest.mark.parametrize("ttl", [0, 3599, 315_360_001, -5])
def test_time_to_live_out_of_range_is_refused(server, ttl):
    failure = server.failure(save(server, server.model(), 1, ttl_seconds=ttl))
    assert failure["category"] == "user" and "ttl_seconds" in failure["error"]
    assert server.http.put(url(saved(server), "/ttl"), json={"ttl_seconds": ttl}).status_code == 400


def test_time_to_live_can_be_set_and_removed(server):
    path = saved(server)
    assert server.http.put(url(path, "/ttl"), json={"ttl_seconds": 3600}).status_code == 204
    assert "expires_at" in listed(server, path)
    assert server.http.put(url(path, "/ttl"), json={"ttl_seconds": None}).status_code == 204
    assert "expires_at" not in listed(server, path)


def test_time_to_live_that_is_not_given_at_all_is_400(server):
    response = server.http.put(url(saved(server), "/ttl"), json={})
    assert response.status_code == 400 and "ttl_seconds" in response.json()["detail"]


def test_time_to_live_of_an_unnamed_version_is_refused(server):
    request = publish(server, server.model(), 1, sampling_session_seq_id=0, ttl_seconds=3600)
    assert "ttl_seconds" in server.failure(request)["error"]


def test_expired_checkpoint_is_unknown_at_once(server):
    path = saved(server, ttl_seconds=3600)
    expire(server, path)
    assert listed(server, path) is None
    assert path not in [entry["tinker_path"] for entry in get(server, "/checkpoints", limit=1000)["checkpoints"]]
    assert server.post("/weights_info", {"tinker_path": path}).status_code == 404
    assert "no such checkpoint" in server.failure(load_as_new(server, path))["error"]
    assert server.http.put(url(path, "/ttl"), json={"ttl_seconds": None}).status_code == 404


def test_name_of_an_expired_checkpoint_can_be_used_again(server):
    model = server.model()
    path = server.result(save(server, model, 1, ttl_seconds=3600))["path"]
    expire(server, path)
    assert server.result(save(server, model, 2))["path"] == path


# -- keys -------------------------------------------------------------------------------------------------------------


def test_lists_hold_the_callers_own_only(as_a):
    path = saved(as_a)
    switch_to(as_a, "tml-b")
    assert path not in str(get(as_a, "/checkpoints", limit=1000))
    assert path.split("/")[2] not in str(get(as_a, "/training_runs", limit=1000, access_scope="accessible"))


def test_public_checkpoint_of_another_key_can_be_loaded(as_a):
    model = as_a.model()
    as_a.train(model, 1)
    before = as_a.logprobs(model, 3)
    path = as_a.result(save(as_a, model, 4))["path"]
    as_a.http.post(url(path, "/publish"))
    switch_to(as_a, "tml-b")
    assert as_a.logprobs(as_a.result(load_as_new(as_a, path))["model_id"], 1) == before


def test_public_checkpoint_of_another_key_can_be_sampled(as_a):
    path = published(as_a)
    as_a.http.post(url(path, "/publish"))
    own = as_a.sample(as_a.sampler(as_a.session(), 0, model_path=path), 0)
    switch_to(as_a, "tml-b")
    assert as_a.sample(as_a.sampler(as_a.session(), 0, model_path=path), 0) == own


def test_public_checkpoint_of_another_key_can_be_looked_at(as_a):
    path = saved(as_a)
    as_a.http.post(url(path, "/publish"))
    model = path.split("/")[2]
    switch_to(as_a, "tml-b")
    assert as_a.ok("/weights_info", {"tinker_path": path})["lora_rank"] == 4
    assert listed(as_a, path)["public"] is True
    assert get(as_a, f"/training_runs/{model}", access_scope="accessible")["training_run_id"] == model
    assert model in str(get(as_a, "/training_runs", limit=1000, access_scope="accessible"))
    assert model not in str(get(as_a, "/training_runs", limit=1000))


def test_public_checkpoint_shows_nothing_else_of_its_run(as_a):
    model = as_a.model(user_metadata={"secret": "s"})
    public = as_a.result(save(as_a, model, 1, "public"))["path"]
    private = as_a.result(save(as_a, model, 2, "private"))["path"]
    as_a.http.post(url(public, "/publish"))
    switch_to(as_a, "tml-b")
    run = get(as_a, f"/training_runs/{model}", access_scope="accessible")
    assert run["last_checkpoint"]["tinker_path"] == public and "user_metadata" not in run
    assert listed(as_a, private) is None


def test_public_checkpoint_of_another_key_cannot_be_changed(as_a):
    path = saved(as_a)
    as_a.http.post(url(path, "/publish"))
    switch_to(as_a, "tml-b")
    answers = [
        as_a.http.delete(url(path)),
        as_a.http.delete(url(path, "/publish")),
        as_a.http.put(url(path, "/ttl"), json={"ttl_seconds": 3600}),
    ]
    assert {answer.status_code for answer in answers} == {404}


def test_checkpoint_that_is_private_again_is_unknown_to_other_keys(as_a):
    path = saved(as_a)
    as_a.http.post(url(path, "/publish"))
    assert as_a.http.delete(url(path, "/publish")).status_code == 204
    switch_to(as_a, "tml-b")
    assert as_a.post("/weights_info", {"tinker_path": path}).status_code == 404


@pytest.mark.parametrize("method", ["post", "delete"])
def test_sharing_what_is_shared_already_is_no_error(server, method):
    path = saved(server)
    assert [server.http.request(method, url(path, "/publish")).status_code for _ in range(2)] == [204, 204]


def test_checkpoint_of_another_key_can_be_loaded_with_that_key(as_a):
    path = saved(as_a)
    switch_to(as_a, "tml-b")
    body = {"session_id": as_a.session(), "model_seq_id": 0, "path": path, "weights_access_token": "tml-a"}
    assert as_a.run("/load_weights", body)["path"] == path


def test_access_token_that_is_no_key_is_refused_without_being_repeated(as_a):
    body = {"session_id": as_a.session(), "model_seq_id": 0, "path": saved(as_a), "weights_access_token": "tml-wrong"}
    failure = as_a.failure(as_a.ok("/load_weights", body)["request_id"])
    assert "weights_access_token" in failure["error"] and "tml-wrong" not in failure["error"]
