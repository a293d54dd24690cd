"""Names of the key file: what operators and the tenants themselves see, and what does not depend on them."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker

from skyrl.tinker.identity.ids import tenant_of_key
from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready
from tests.tinker.test_ledger import usage
from tests.waiting import until

OPERATOR, ALICE, BOB = "tml-operator", "tml-alice", "tml-bob"
ID = tenant_of_key(ALICE.encode())
PATHS = ("/status", "/operator/requests", "/operator/models", "/operator/usage", "/metrics")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LiveServer]:
    """One with a named and an unnamed key, and a waiting request of each."""
    folder: Path = tmp_path_factory.mktemp("server")
    options = {"api_keys": [f"alice {ALICE}", BOB], "operator_keys": [OPERATOR], "access_log": True}
    with LiveServer(folder, **options) as server:
        wait_until_ready(server)
        for key in (ALICE, BOB):
            server.http.headers["X-API-Key"] = key
            model = server.model()
            server.train(model, 1)
            server.submit_pass(model, 100)
        yield server


def told(server: LiveServer, path: str, **asked: str) -> Any:
    answer = server.http.get(server.url + path, params=asked, headers={"X-API-Key": OPERATOR})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", PATHS)
def test_operators_see_the_name_and_no_key(server, path):
    text = server.http.get(server.url + path, headers={"X-API-Key": OPERATOR}).text
    assert '"alice"' in text and tenant_of_key(BOB.encode()) in text
    assert not any(key in text for key in (ALICE, BOB, OPERATOR))


@pytest.mark.parametrize("kind", ["requests", "models"])
@pytest.mark.parametrize("given", ["alice", ID])
def test_lists_are_filtered_by_name_and_by_id(server, kind, given):
    found = told(server, f"/operator/{kind}", tenant=given)
    assert ([one["tenant"] for one in found[kind]], found["total"]) == (["alice"], 1)


def test_lists_of_a_name_that_nobody_has_are_empty(server):
    assert told(server, "/operator/requests", tenant="carol") == {"requests": [], "total": 0}


def test_a_line_of_the_access_log_has_the_name(server, caplog):
    caplog.set_level(logging.INFO, "skyrl.access")
    server.http.get("/training_runs/none", headers={"X-API-Key": ALICE})
    until(lambda: "training_runs" in caplog.text, "the line is written")
    assert " to alice at 127.0.0.1" in caplog.text and ID not in caplog.text


def test_a_tenant_is_told_its_name_and_an_identity_that_does_not_depend_on_it(server):
    me = tinker.RestClient(base_url=server.url, api_key=ALICE).whoami().result()
    assert me.user_urn == f"skyrl:user:{ID}" and me.email == "alice@localhost"
    assert {event["user_name"] for event in usage(server, ALICE)} == {"alice"}


@pytest.mark.parametrize("line", [ALICE, f"carol {ALICE}", f"alice tml-new {ID}"], ids=["none", "other", "new key"])
def test_a_change_of_the_name_changes_no_owner(tmp_path, line):
    with LiveServer(tmp_path, api_keys=[f"alice {ALICE}"]) as server:
        wait_until_ready(server)
        server.http.headers["X-API-Key"] = ALICE
        model = server.model()
        following = server.train(model, 1)
    key = next(word for word in line.split() if word.startswith("tml-"))
    with LiveServer(tmp_path, api_keys=[line]) as server:
        wait_until_ready(server)
        server.http.headers["X-API-Key"] = key
        client = tinker.RestClient(base_url=server.url, api_key=key)
        assert [run.training_run_id for run in client.list_training_runs().result().training_runs] == [model]
        server.train(model, following)


def test_a_token_goes_on_through_a_change_of_the_name(tmp_path):
    with LiveServer(tmp_path, api_keys=[f"alice {ALICE}"]) as server:
        token = server.ok("/auth/token", headers={"X-API-Key": ALICE})["jwt"]
    with LiveServer(tmp_path, api_keys=[f"carol {ALICE}"]) as server:
        answer = server.http.get("/auth/apikey/me", headers={"X-API-Key": token})
        assert (answer.status_code, answer.json()["name"]) == (200, "carol")


def test_a_server_without_keys_has_no_names(own_server):
    own_server.train(own_server.model(), 1)
    [row] = own_server.http.get(f"{own_server.url}/operator/usage").json()["data"]
    assert (row["tenant"], row["base_model"], "tenant_id" in row) == ("local", BASE_MODEL, False)
