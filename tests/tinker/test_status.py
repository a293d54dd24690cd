"""Status of a server as its operator sees it, against what its clients have sent."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl.tinker.http import operators
from skyrl.tinker.identity.ids import tenant_of_key
from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready
from tests.waiting import BOUND_S

OPERATOR, ALICE, BOB = "tml-operator", "tml-alice", "tml-bob"
LOOKS = ("/status", "/operator/requests", "/operator/models", "/operator/usage", "/metrics")
ORDERS = ("/operator/models/x:train:0/unload", "/operator/requests/optim_step-1/cancel")


def told(server: LiveServer, path: str, key: str = "", **asked: Any) -> Any:
    response = server.http.get(server.url + path, params=asked, headers={"X-API-Key": key} if key else {})
    assert response.status_code == 200, response.text
    return response.json()


def requests(server: LiveServer, **asked: Any) -> dict[str, dict[str, Any]]:
    """Requests by their ids."""
    return {one["request_id"]: one for one in told(server, "/operator/requests", **asked)["requests"]}


def until(look: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:
    """Look until something holds, which the engine may tell a moment later."""
    end = time.monotonic() + BOUND_S
    while not holds(found := look()):
        assert time.monotonic() < end, found
        time.sleep(0.01)
    return found


def test_each_request_is_told_with_what_it_waits_for(own_server):
    model, sampler = own_server.model(), own_server.sampler(own_server.session(), 0, base_model=BASE_MODEL)
    own_server.engine.hold()
    runs, behind, last = (own_server.submit_pass(model, place) for place in (1, 2, 3))
    until(lambda: requests(own_server)[runs]["state"], lambda state: state == "running")
    sample = own_server.submit_sample(sampler, 0)["request_id"]
    found = requests(own_server)
    own_server.engine.let_go()
    assert {name: (one["kind"], one["model_id"], one["seq_id"], one["waits_for"]) for name, one in found.items()} == {
        runs: ("forward_backward", model, 1, None),
        behind: ("forward_backward", model, 2, "1 earlier request of its model"),
        last: ("forward_backward", model, 3, "2 earlier requests of its model"),
        sample: ("sample", "", None, "its turn"),
    }
    assert list(found) == [runs, behind, last, sample]  # the oldest first


def test_a_request_whose_predecessor_is_missing_says_which(own_server):
    model = own_server.model()
    early = own_server.submit_pass(model, 2)
    found = until(lambda: requests(own_server)[early], lambda one: "seq_id" in str(one["waits_for"]))
    assert found["waits_for"] == "the request with seq_id=1, which has not arrived"


def test_requests_are_picked_by_tenant_model_kind_and_state(own_server):
    first, second = own_server.model(), own_server.model()
    own_server.engine.hold()
    ours = [own_server.submit_pass(first, 1), own_server.submit_step(first, 2)]
    other = own_server.submit_pass(second, 1)
    until(lambda: requests(own_server, state="running"), lambda found: len(found) == 1)
    assert set(requests(own_server, model=first)) == set(ours)
    assert set(requests(own_server, kind="optim_step")) == {ours[1]}
    assert set(requests(own_server, tenant="local")) == {*ours, other}
    assert requests(own_server, tenant="somebody") == {}
    page = told(own_server, "/operator/requests", limit=1)
    own_server.engine.let_go()
    assert [one["request_id"] for one in page["requests"]] == ours[:1] and page["total"] == 3


def test_counts_of_the_whole_add_up_to_those_of_models_and_tenants(own_server):
    model, idle = own_server.model(), own_server.model()
    own_server.train(model, 1, [1, 2, 3, 4])
    sampler = own_server.sampler(own_server.session(), 0, base_model=BASE_MODEL)
    own_server.engine.hold()
    own_server.submit_pass(model, 3), own_server.submit_step(model, 4)
    until(lambda: told(own_server, "/status")["requests"]["running"], lambda running: running == 1)
    for number in range(3):
        own_server.submit_sample(sampler, number)
    found = told(own_server, "/status")
    own_server.engine.let_go()
    models = {one["model_id"]: (one["state"], one["running"], one["waiting"]) for one in found["models"]}
    assert models == {
        "": ("in the engine", {}, 3),
        model: ("in the engine", {"forward_backward": 1}, 1),
        idle: ("in the engine", {}, 0),
    }
    counts = {name: found["requests"][name] for name in ("running", "waiting", "failed", "ended")}
    ended = {"create_model": 2, "forward_backward": 1, "optim_step": 1}
    assert counts == {"running": 1, "waiting": 4, "failed": 0, "ended": ended}
    assert found["tenants"] == [{"tenant": "local", "running": 1, "waiting": 4, "trained": 4}]
    assert found["memory"]["api"] > 2**20 and found["disk"]["free"] > 0
    assert found["engine"] == {
        "state": "ready",
        "progress": "ready",
        "pid": None,
        "restarts": 0,
        "base_model": BASE_MODEL,
    }


def test_while_the_engine_is_away_all_waits_for_it(own_server):
    model = own_server.model()
    own_server.crash()
    request = own_server.submit_pass(model, 1)
    found = told(own_server, "/status")
    assert (found["engine"]["state"], found["engine"]["restarts"]) == ("restarting", 1)
    assert requests(own_server)[request]["waits_for"] == "the engine: restarting"
    assert told(own_server, "/operator/models")["models"][0]["state"] == "on disk"
    own_server.recover()
    own_server.outcome(request)
    assert told(own_server, "/operator/models")["models"][0]["state"] == "in the engine"


def test_a_model_that_is_parked_is_on_disk_and_one_that_is_unloaded_is_not_listed(own_server):
    session = own_server.session()
    parked, unloaded = own_server.model(session, 0), own_server.model(session, 1)
    own_server.run("/unload_model", {"model_id": unloaded})
    assert own_server.post(f"/sessions/{session}/finish", {}).status_code == 204
    look = lambda: told(own_server, "/operator/models")  # noqa: E731
    found = until(look, lambda found: (one := found["models"][0])["state"] == "on disk" and one["snapshot_bytes"])
    assert [one["model_id"] for one in found["models"]] == [parked] and found["total"] == 1
    assert found["models"][0]["rank"] == 4 and found["models"][0]["snapshot_bytes"] > 0


def test_it_is_answered_while_the_database_is_away(own_server, monkeypatch):
    monkeypatch.setattr(operators, "PATIENCE_S", 0.1)
    model = own_server.model()
    readers, go_on = own_server.app.state.server.service.database._readers, threading.Event()
    for _ in range(readers._max_workers):
        readers.submit(go_on.wait)
    try:
        found = told(own_server, "/status")
    finally:
        go_on.set()
    assert [one["model_id"] for one in found["models"]] == [model]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("guarded")
    with LiveServer(folder, api_keys=[ALICE, BOB], operator_keys=[OPERATOR]) as server:
        server.http.headers["X-API-Key"] = ALICE
        wait_until_ready(server)
        model = server.model()
        server.submit_pass(model, 2, [123456, 123457])
        server.http.headers["X-API-Key"] = BOB
        server.model()
        yield server


@pytest.mark.parametrize(("key", "refusal"), [(OPERATOR, None), (ALICE, 403), ("tml-wrong", 401), ("", 401)])
def test_with_keys_operators_alone_look_and_give_orders(guarded, key, refusal):
    for method, paths, answer in (("GET", LOOKS, 200), ("POST", ORDERS, 404)):
        for path in paths:
            response = guarded.http.request(method, guarded.url + path, headers={"X-API-Key": key})
            assert response.status_code == (refusal or answer), (path, response.text)


def test_models_are_picked_by_tenant(guarded):
    found = told(guarded, "/operator/models", OPERATOR, tenant=tenant_of_key(BOB.encode()))
    assert [one["tenant"] for one in found["models"]] == [tenant_of_key(BOB.encode())] and found["total"] == 1
