"""Ids of requests, the access log and logs as JSON."""

import json
import logging
import platform
import time
from importlib import metadata

import pytest

from skyrl.tinker.identity.ids import tenant_of_key
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.processes import running

KEY = "tml-never-to-be-logged"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with LiveServer(tmp_path_factory.mktemp("server"), api_keys=[KEY], access_log=True) as server:
        wait_until_ready(server)
        yield server


def ask(server: LiveServer, path: str, **headers: str):
    return server.http.get(f"{server.url}{path}", headers={"X-API-Key": KEY, **headers})


@pytest.mark.parametrize("given", ["a", "0a1b-2c.3d_4e:5f", "x" * 64])
def test_the_id_of_a_client_comes_back(server, given):
    assert ask(server, "/livez", **{"X-Request-Id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "INFO forged: line", "a;b"])
def test_an_id_that_is_none_is_replaced_by_one_of_its_own(server, given):
    found = [ask(server, "/livez", **{"X-Request-Id": given}).headers["x-request-id"] for _ in range(2)]
    assert len(set(found)) == 2 and all(len(one) == 32 and one.isalnum() for one in found)


@pytest.mark.parametrize("path", ["/api/v1/none", "/api/v1/training_runs/none"])
def test_answers_that_refuse_have_an_id_too(server, path):
    answer = ask(server, path, **{"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (404, "mine")


def test_a_line_of_the_access_log_has_the_route_and_the_tenant_and_no_key(server, caplog):
    caplog.set_level(logging.INFO, "skyrl.access")
    answer = ask(server, "/api/v1/training_runs/secret-name")
    while "run_id" not in caplog.text:  # it is written once the answer is sent
        time.sleep(0.01)
    (said,) = [record.getMessage() for record in caplog.records if "run_id" in record.getMessage()]
    assert said.startswith(f"GET /api/v1/training_runs/{{run_id}} 404, {len(answer.content)} bytes in ")
    assert f" to {tenant_of_key(KEY.encode())} at 127.0.0.1" in said
    assert KEY not in said and "secret-name" not in said


@pytest.mark.full
def test_logs_of_both_processes_are_objects_with_the_ids_of_requests(tmp_path):
    with running(tmp_path, log_format="json", access_log="true") as server:
        server.http.get(f"{server.url}/livez", headers={"X-Request-Id": "mine", "X-API-Key": KEY})
        server.wait_for('"request_id": "mine"')
    lines = [json.loads(line) for line in server.output.splitlines() if line.startswith("{")]
    assert {"", "engine"} <= {line.get("process", "") for line in lines}
    (mine,) = [line for line in lines if line.get("request_id") == "mine"]
    assert {"method": "GET", "route": "/livez", "status": 200, "logger": "skyrl.access"}.items() <= mine.items()
    assert KEY not in server.output


def test_versions_are_those_that_are_installed(server):
    found = server.http.get(f"{server.url}/version", headers={"X-API-Key": ""}).json()
    assert (found["version"], found["python"]) == (metadata.version("skyrl"), platform.python_version())
    assert found["packages"]["jax"] == metadata.version("jax")
