"""Sessions over HTTP: listed, looked at, searched, moved to a project."""

from datetime import UTC, datetime

import pytest

from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready
from tests.tinker.test_api_checkpoints import save


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A server that only the tests of searching use, and its sessions by name, oldest first."""
    with LiveServer(tmp_path_factory.mktemp("searched")) as server:
        wait_until_ready(server)
        sessions = {
            "one": session(server, display_name="Nightly run of math", project_id="p"),
            "two": session(server, display_name="math by day", user_metadata={"team": "a", "n": 3}),
            "three": session(server, user_metadata={"team": "a"}),
            "four": session(server, project_id="p"),
        }
        finish(server, sessions["three"], "errored")
        yield server, sessions


def session(server: LiveServer, **body) -> str:
    return server.ok("/create_session", body)["session_id"]


def finish(server: LiveServer, session_id: str, reason: str = "success") -> None:
    assert server.post(f"/sessions/{session_id}/finish", {"reason": {"type": reason}}).status_code == 204


def get(server: LiveServer, path: str, **params):
    response = server.http.get(path, params=params)
    assert response.status_code == 200, response.text
    return response.json()


def found(searched, **request) -> list[str]:
    """Names of the sessions that a search finds, newest first."""
    server, sessions = searched
    names = {session_id: name for name, session_id in sessions.items()}
    return [names[summary["session_id"]] for summary in server.ok("/sessions/search", request)["sessions"]]


def test_sessions_are_listed_newest_first_in_pages(own_server):
    sessions = [session(own_server) for _ in range(3)]
    pages = [get(own_server, "/sessions", limit=2, offset=offset)["sessions"] for offset in (0, 2)]
    assert pages[0] + pages[1] == sessions[::-1]


def test_session_lists_its_runs_and_samplers(server):
    session_id = session(server, display_name="d", user_metadata={"a": "b", "n": 1})
    models = [server.model(session_id, number) for number in range(2)]
    sampler = server.sampler(session_id, 0, base_model=BASE_MODEL)
    assert get(server, f"/sessions/{session_id}") == {
        "training_run_ids": models,
        "sampler_ids": [sampler],
        "user_metadata": {"a": "b", "n": "1"},
        "display_name": "d",
    }


def test_session_moves_to_a_project_with_its_runs(own_server):
    session_id = session(own_server)
    model = own_server.model(session_id)
    response = own_server.http.put(f"/sessions/{session_id}/project", json={"project_id": "p"})
    assert response.status_code == 204
    assert get(own_server, "/training_runs", project_id="p")["training_runs"][0]["training_run_id"] == model


def test_search_without_conditions_finds_everything_newest_first(searched):
    assert found(searched) == ["four", "three", "two", "one"]


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        ({"display_name": "MATH"}, ["two", "one"]),
        ({"display_name": "math nightly"}, ["one"]),
        ({"display_name": "weekly"}, []),
        ({"user_metadata": {"team": "a"}}, ["three", "two"]),
        ({"user_metadata": {"team": "a", "n": "3"}}, ["two"]),
        ({"project_ids": ["p"]}, ["four", "one"]),
        ({"project_ids": ["default"]}, ["three", "two"]),
        ({"project_ids": []}, []),
        ({"statuses": [{"type": "active"}]}, ["four", "two", "one"]),
        ({"statuses": [{"type": "client_finished"}]}, ["three"]),
        ({"statuses": [{"type": "client_finished", "reasons": ["success"]}]}, []),
        ({"statuses": [{"type": "failed"}, {"type": "client_finished", "reasons": ["errored"]}]}, ["three"]),
        ({"owner": {"type": "accessible"}}, ["four", "three", "two", "one"]),
        ({"owner": {"type": "user", "owner_urns": ["skyrl:user:local"]}}, ["four", "three", "two", "one"]),
        ({"owner": {"type": "user", "owner_urns": ["somebody"]}}, []),
        ({"session_id": "none"}, []),
    ],
)
def test_search_finds_what_matches(searched, request_, names):
    assert found(searched, **request_) == names


def test_search_by_id_or_name_finds_either(searched):
    _, sessions = searched
    assert found(searched, session_id=sessions["three"]) == ["three"]
    assert found(searched, session_id=sessions["three"], display_name="nightly") == ["three", "one"]


def test_pages_of_a_search_follow_each_other(searched):
    server, sessions = searched
    pages, cursor = [], None
    while True:
        page = server.ok("/sessions/search", {"limit": 1, "cursor": cursor})
        pages += [summary["session_id"] for summary in page["sessions"]]
        cursor = page.get("next_cursor")
        if cursor is None:
            break
    assert pages == list(sessions.values())[::-1]


def test_search_result_sums_up_the_session(own_server):
    before = datetime.now(UTC)
    session_id = session(own_server, project_id="p", display_name="d", user_metadata={"a": "b"})
    model = own_server.model(session_id)
    own_server.result(save(own_server, model, 1, "a"))
    own_server.result(save(own_server, model, 2, "b"))
    size = sum(entry["size_bytes"] for entry in get(own_server, "/checkpoints")["checkpoints"])
    (summary,) = own_server.ok("/sessions/search", {})["sessions"]
    assert before <= datetime.fromisoformat(summary.pop("created_at")) <= datetime.now(UTC)
    assert summary == {
        "session_id": session_id,
        "owner": "skyrl:user:local",
        "project_id": "p",
        "status": {"type": "active"},
        "checkpoints_count": 2,
        "display_name": "d",
        "user_metadata": {"a": "b"},
        "checkpoint_storage_bytes": size,
    }


@pytest.mark.parametrize(
    "request_",
    [
        {"limit": 0},
        {"limit": 201},
        {"owner": {"type": "user"}},
        {"owner": {"type": "own", "owner_urns": ["x"]}},
        {"statuses": []},
        {"statuses": [{"type": "active", "reasons": ["success"]}]},
        {"cursor": {"last_created_at": "2024-01-01T00:00:00", "last_session_id": "x"}},
        {"display_name": ""},
    ],
)
def test_bad_search_is_400(server, request_):
    assert server.post("/sessions/search", request_).status_code == 400


@pytest.mark.full
def test_sessions_of_another_key_are_not_found(tmp_path):
    with LiveServer(tmp_path, api_keys=["tml-a", "tml-b"]) as server:
        wait_until_ready(server)
        server.http.headers["X-API-Key"] = "tml-a"
        session_id = session(server)
        server.http.headers["X-API-Key"] = "tml-b"
        assert get(server, "/sessions", access_scope="accessible")["sessions"] == []
        assert server.ok("/sessions/search", {"session_id": session_id})["sessions"] == []
        assert server.http.get(f"/sessions/{session_id}").status_code == 404
