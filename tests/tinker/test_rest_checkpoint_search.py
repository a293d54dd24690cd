"""Searching checkpoints over HTTP: each page holds what the list of all of them holds, as far as it matches."""

from typing import Any

import pytest

from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready
from tests.tinker.test_api_checkpoints import publish, save
from tests.tinker.test_rest_checkpoints import expire, get, url


def search(server: LiveServer, **request: Any) -> dict[str, Any]:
    return server.ok("/checkpoints/search", request)


def paths(found: dict[str, Any]) -> list[str]:
    return [entry["tinker_path"] for entry in found["checkpoints"]]


def model(server: LiveServer, project_id: str | None = None) -> str:
    return server.model(server.ok("/create_session", {"project_id": project_id})["session_id"])


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A server that only these tests use, and its checkpoints by name, oldest first."""
    with LiveServer(tmp_path_factory.mktemp("searched"), api_keys=["tml-a", "tml-b"]) as server:
        wait_until_ready(server)
        server.http.headers["X-API-Key"] = "tml-b"
        shared = server.result(save(server, model(server), 1, "shared"))["path"]
        assert server.http.post(url(shared, "/publish")).status_code == 204
        server.result(save(server, model(server), 1, "hidden"))
        server.http.headers["X-API-Key"] = "tml-a"
        mine, other = model(server, "p"), model(server)
        made = {
            "shared": shared,
            "one": server.result(save(server, mine, 1, "one", user_metadata={"team": "a", "n": "3"}))["path"],
            "two": server.result(publish(server, mine, 2, path="two"))["path"],
            "three": server.result(save(server, other, 1, "three", user_metadata={"team": "a"}))["path"],
            "four": server.result(publish(server, other, 2, path="four"))["path"],
        }
        expire(server, server.result(save(server, mine, 3, "expired"))["path"])
        yield server, made


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        ({}, ["four", "three", "two", "one"]),
        ({"project_ids": ["p"]}, ["two", "one"]),
        ({"project_ids": ["default"]}, ["four", "three"]),
        ({"project_ids": []}, []),
        ({"user_metadata": {"team": "a"}}, ["three", "one"]),
        ({"user_metadata": {"team": "a", "n": "3"}}, ["one"]),
        ({"checkpoint_type": "training"}, ["three", "one"]),
        ({"checkpoint_type": "sampler"}, ["four", "two"]),
        ({"checkpoint_type": "external"}, []),
        ({"checkpoint_type": "training", "project_ids": ["p"]}, ["one"]),
        ({"base_models": [BASE_MODEL, "another"]}, ["four", "three", "two", "one"]),
        ({"base_models": ["another"]}, []),
        ({"base_models": []}, []),
        ({"owner": {"type": "own"}}, ["four", "three", "two", "one"]),
        ({"owner": {"type": "accessible"}}, ["four", "three", "two", "one", "shared"]),
        ({"owner": {"type": "user", "owner_urns": ["somebody"]}}, []),
    ],
    ids=str,
)
def test_pages_of_a_search_are_what_matches_newest_first(searched, request_, names):
    server, made = searched
    found, cursor = [], None
    while True:
        page = search(server, **request_, limit=1, cursor=cursor)
        found += paths(page)
        cursor = page.get("next_cursor")
        if cursor is None:
            break
    assert found == [made[name] for name in names]


def test_entries_of_a_search_are_those_of_the_list(searched):
    server, _ = searched
    assert search(server) == {"checkpoints": get(server, "/checkpoints")["checkpoints"]}


def test_checkpoints_of_a_user_are_found_by_the_urn_of_its_runs(searched):
    server, _ = searched
    urn = get(server, "/training_runs")["training_runs"][0]["model_owner"]
    assert paths(search(server, owner={"type": "user", "owner_urns": [urn]})) == paths(search(server))


def test_checkpoints_that_come_and_go_meanwhile_do_not_shift_the_next_page(own_server):
    run = own_server.model()
    first, second, third = (own_server.result(save(own_server, run, n, f"n{n}"))["path"] for n in (1, 2, 3))
    page = search(own_server, limit=1)
    own_server.result(save(own_server, run, 4, "later"))
    assert own_server.http.delete(url(third)).status_code == 204
    rest = search(own_server, cursor=page["next_cursor"])
    assert (paths(page), paths(rest)) == ([third], [second, first])


@pytest.mark.parametrize(
    "request_",
    [
        {"limit": 0},
        {"limit": 201},
        {"checkpoint_type": "weights"},
        {"owner": {"type": "user"}},
        {"cursor": {"last_created_at": "2024-01-01T00:00:00Z", "last_checkpoint_uuid": "x"}},
    ],
    ids=str,
)
def test_bad_search_for_checkpoints_is_400(server, request_):
    assert server.post("/checkpoints/search", request_).status_code == 400
