"""A server without keys serves programs of its machine, and no web page that a browser there has open."""

import pytest

from tests.tinker.harness import LiveServer, wait_until_ready

SESSION = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with LiveServer(tmp_path_factory.mktemp("open")) as server:
        wait_until_ready(server)
        yield server


def make_session(server: LiveServer, **headers: str):
    return server.post("/create_session", SESSION, headers={name.replace("_", "-"): v for name, v in headers.items()})


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000", "127.0.0.2"])
def test_names_of_this_machine_are_served(server, host):
    assert make_session(server, Host=host).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example:8000",
        "10.0.0.1",
        "localhost.evil",
        "[::1",
        "",
        "[foo]",
        "a]b[",
        "evil@127.0.0.1",
    ],
)
def test_a_name_that_a_page_lets_point_here_is_refused(server, host):
    response = make_session(server, Host=host)
    assert response.status_code == 403 and "Host=" in response.json()["detail"], response.text


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "https://127.0.0.1", "http://["]
)
def test_a_page_of_another_site_is_refused(server, origin):
    response = make_session(server, Origin=origin)
    assert response.status_code == 403 and "Origin=" in response.json()["detail"]


def test_a_page_of_this_server_is_served(server):
    assert make_session(server, Origin=server.url).status_code == 200


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_form_sends_is_not_read(server, media_type):
    response = make_session(server, Content_Type=media_type)
    assert response.status_code == 400 and "Content-Type=" in response.json()["detail"]


def test_a_body_without_a_type_is_not_read(server):
    response = server.http.post("/create_session", content=b"{}")
    assert response.status_code == 400 and "send application/json or application/x-protobuf" in response.text


@pytest.fixture(scope="module")
def with_keys(tmp_path_factory):
    with LiveServer(tmp_path_factory.mktemp("keys"), api_keys=["tml-test"]) as server:
        wait_until_ready(server)
        yield server


def test_with_keys_a_server_may_have_any_name(with_keys):
    assert make_session(with_keys, Host="tinker.example", Origin="https://tinker.example").status_code == 200


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/plain"}, {"Content-Type": "nonsense"}])
def test_with_keys_json_is_read_whatever_its_type(with_keys, headers):
    response = with_keys.http.post("/create_session", content=b'{"tags": []}', headers=headers)
    assert response.json()["session_id"]
