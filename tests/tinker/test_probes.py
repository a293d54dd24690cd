"""Liveness apart from readiness, as an orchestrator asks for them."""

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from skyrl.tinker.processes.engine_supervisor import READY, SILENT
from tests.tinker.harness import LiveServer, wait_until_ready


@pytest.fixture
def server(tmp_path):
    with LiveServer(tmp_path, api_keys=["tml-test"]) as server:
        wait_until_ready(server)
        yield server


def probe(server: LiveServer, name: str) -> tuple[int, str]:
    response = server.http.get(f"{server.url}/{name}", headers={"X-API-Key": ""})
    return response.status_code, response.json().get("detail", "")


def test_a_server_that_serves_is_alive_and_ready(server):
    assert [probe(server, name) for name in ("livez", "readyz")] == [(200, ""), (200, "")]


def test_without_an_engine_it_is_alive_and_says_why_it_is_not_ready(server):
    server.crash()
    assert probe(server, "livez") == (200, "")
    assert probe(server, "readyz") == (503, "the engine is not ready: restarting")
    server.recover()
    assert probe(server, "readyz") == (200, "")


def test_an_engine_that_has_fallen_silent_is_not_ready(server):
    server.engine.progress = SILENT
    assert probe(server, "readyz") == probe(server, "api/v1/healthz")
    assert probe(server, "readyz") == (503, f"the engine is not ready: {SILENT}")
    server.engine.progress = READY
    assert probe(server, "readyz") == (200, "")


@pytest.mark.parametrize("name", ["readyz", "api/v1/healthz"])
def test_who_has_no_key_learns_nothing_of_the_servers_disks(server, name):
    server.crash()
    server.engine.progress = "restarting the engine: cannot read /srv/models/secret-model"
    assert probe(server, name) == (503, "the engine is not ready: restarting")
    server.recover()


def test_without_a_database_it_is_alive_and_not_ready(server):
    engine = server.app.state.server.service.database._engine

    def gone(*_: object) -> None:
        raise OperationalError("SELECT 1", {}, Exception("the server closed the connection"))

    event.listen(engine, "before_cursor_execute", gone)
    assert probe(server, "livez") == (200, "")
    assert probe(server, "readyz") == (503, "the database does not answer")
    event.remove(engine, "before_cursor_execute", gone)
    assert probe(server, "readyz") == (200, "")
