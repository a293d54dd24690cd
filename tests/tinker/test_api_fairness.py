"""Fairness between requests in the whole server. The fake backend computes one quantum for each turn of a gate.

What is counted are quanta, in the order in which they were computed, while the engine had all that is compared.
"""

import threading
from collections import Counter
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import pytest

from skyrl.tinker.processes.messages import Enqueue, Revive
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.waiting import until

KEYS = ("tml-a", "tml-b", "tml-c")
TOGETHER = [1, 4]


@contextmanager
def serving(folder: Path, **options):
    with LiveServer(folder, **options) as server:
        wait_until_ready(server)
        yield server


def speak_as(server: LiveServer, key: str) -> None:
    server.http.headers["X-API-Key"] = key


def stop_at(server: LiveServer, model: str, seq_id: int) -> str:
    """Have the engine stopped at a pass of this model. Returns the pass."""
    server.engine.hold()
    request = server.submit_pass(model, seq_id)
    until(lambda: (request,) in server.engine.backend.journal, "the engine is at the pass")
    return request


def go_on_with(server: LiveServer, requests: list[str]) -> list[tuple[str, ...]]:
    """Let a stopped engine go once it has all of these, until it has done them. Returns its calls from then on."""
    journal = server.engine.backend.journal
    until(lambda: len(server.engine.inbox) == len(requests), "the engine has all requests")
    before = len(journal)
    server.engine.let_go()
    until(lambda: set(requests) <= set(server.engine.done), "the engine has done all requests")
    return [entry for entry in journal[before:] if isinstance(entry, tuple)]


@pytest.mark.full
@pytest.mark.parametrize("together", TOGETHER)
@pytest.mark.parametrize("keys", [KEYS, ()], ids=["keys", "sessions"])
def test_a_flood_delays_a_small_request_of_another_tenant_by_what_is_left_of_one_quantum(tmp_path, together, keys):
    backend_config = {"quanta_per_pass": 5, "most_together": together}
    with serving(tmp_path, api_keys=keys, backend_config=backend_config) as server:
        speak_as(server, KEYS[1])
        small = server.model()
        speak_as(server, KEYS[0])
        large = server.model()
        stop_at(server, large, 1)
        flood = [server.submit_pass(large, seq_id, [1] * 1000) for seq_id in range(2, 60)]
        speak_as(server, KEYS[1])
        request = server.submit_pass(small, 1)
        calls = go_on_with(server, [*flood, request])
    last = max(number for number, call in enumerate(calls) if request in call)
    assert sum(request in call for call in calls) == 5
    others = [call for call in calls[: last + 1] if request not in call]
    assert request in calls[0]
    assert len(others) <= 4, "what was left of the pass that ran"
    assert not any(name in call for name in flood for call in others)


@pytest.mark.full
@pytest.mark.parametrize("together", TOGETHER)
def test_weights_of_tenants_are_honoured(tmp_path, together):
    weights, backend_config = {KEYS[0]: 3}, {"quanta_per_pass": 1, "most_together": together}
    with serving(tmp_path, api_keys=KEYS, tenant_weights=weights, backend_config=backend_config) as server:
        models = {}
        for key in KEYS:
            speak_as(server, key)
            models[key] = server.model()
        stop_at(server, models[KEYS[2]], 1)
        owner: dict[str, str] = {}
        for key in KEYS[:2]:
            speak_as(server, key)
            owner |= {server.submit_pass(models[key], seq_id, [1] * 64): key for seq_id in range(1, 41)}
        calls = go_on_with(server, list(owner))
    served: Counter[str] = Counter()
    for call in calls:
        served.update(owner[name] for name in call if name in owner)
        if max(served.values()) < 40:
            heavy, light = (served[key] for key in KEYS[:2])
            assert abs(heavy / 3 - light) <= 2
    assert served == {KEYS[0]: 40, KEYS[1]: 40}


@pytest.mark.full
@pytest.mark.parametrize("together", TOGETHER)
@pytest.mark.parametrize("keys", [KEYS, ()], ids=["of one key", "without keys"])
def test_eight_clients_with_many_small_requests_finish_evenly(tmp_path, together, keys):
    with serving(tmp_path, api_keys=keys, backend_config={"most_together": together}) as server:
        speak_as(server, KEYS[0])
        models = [server.model() for _ in range(9)]
        stop_at(server, models.pop(), 1)
        client_of = {
            server.submit_pass(model, seq_id): client for client, model in enumerate(models) for seq_id in range(1, 21)
        }
        go_on_with(server, list(client_of))
        ends = [client_of[name] for name in server.engine.done if name in client_of]
    finished = dict.fromkeys(range(8), 0)
    for client in ends:
        finished[client] += 1
        assert max(finished.values()) - min(finished.values()) <= 1
    assert set(finished.values()) == {20}


def test_a_session_is_not_given_more_by_sending_its_requests_to_many_models(tmp_path):
    with serving(tmp_path, backend_config={"quanta_per_pass": 1}) as server:
        session, modest = server.session(), server.model()
        greedy = [server.model(session, number) for number in range(6)]
        stop_at(server, server.model(), 1)
        own = [server.submit_pass(modest, seq_id) for seq_id in range(1, 11)]
        others = [server.submit_pass(model, seq_id) for model in greedy for seq_id in range(1, 6)]
        calls = go_on_with(server, [*own, *others])
    ends = list(accumulate(sum(name in own for name in call) for call in calls))
    at = ends.index(10)
    assert sum(name in others for call in calls[: at + 1] for name in call) <= 10 + 2


# -- who is to blame ---------------------------------------------------------------------------------------------------


def crash(server: LiveServer) -> None:
    """The engine ends though it is stopped at the gate."""
    thread = threading.Thread(target=server.crash)
    gate = server.engine.gate
    assert gate is not None
    thread.start()
    until(lambda: server.engine._channel is None, "the engine's channel is closed")
    for _ in range(100):
        gate.release()
    thread.join()


def is_running(server: LiveServer, *requests: str) -> bool:
    return set(requests) == set(server.app.state.server.service.crash_record.running)


def sent_alone(server: LiveServer, since: int) -> dict[str, bool]:
    """Return for each operation in the frames from `since` on whether it was to be computed alone."""
    operations = []
    for frame in server.engine.sent[since:]:
        operations += frame.operations if isinstance(frame, Revive) else []
        operations += [frame.operation] if isinstance(frame, Enqueue) else []
    return {operation.request_id: operation.alone for operation in operations}


def test_requests_that_were_computed_together_when_the_engine_ended_are_computed_alone_again(own_server):
    one, other, bystander = (own_server.model() for _ in range(3))
    first = stop_at(own_server, one, 1)
    waits = own_server.submit_pass(one, 2)
    second = own_server.submit_pass(other, 1)
    until(lambda: len(own_server.engine.inbox) == 2, "the engine has both requests")
    own_server.engine.gate.release()
    until(lambda: is_running(own_server, first, second), "both passes are computed together")
    third = own_server.submit_pass(bystander, 1)
    since = len(own_server.engine.sent)
    crash(own_server)
    own_server.engine.gate = None
    own_server.recover()
    for request in (first, waits, second, third):
        own_server.pass_result(request)
    alone = sent_alone(own_server, since)
    assert {name: alone[name] for name in (first, second, waits, third)} == {
        **{first: True, second: True},
        **{waits: False, third: False},
    }
    calls = [entry for entry in own_server.engine.backend.journal if isinstance(entry, tuple)]
    assert (first,) in calls and (second,) in calls
    assert all(len(call) == 1 for call in calls if first in call or second in call)


def test_a_model_whose_revival_ended_an_engine_repeats_its_past_alone(own_server):
    model = own_server.model()
    seq_id = own_server.train(model, 1)
    own_server.crash()
    own_server.engine.gate = threading.Semaphore(0)
    own_server.recover()
    request = own_server.submit_pass(model, seq_id)
    until(lambda: any(isinstance(entry, tuple) for entry in own_server.engine.backend.journal), "the past is repeated")
    repeated = next(entry for entry in own_server.engine.backend.journal if isinstance(entry, tuple))
    until(lambda: is_running(own_server, *repeated), "the server knows what is repeated")
    assert repeated != (request,)
    since = len(own_server.engine.sent)
    crash(own_server)
    own_server.engine.gate = None
    own_server.recover()
    own_server.pass_result(request)
    alone = sent_alone(own_server, since)
    assert alone.pop(request) is False and len(alone) == 3 and all(alone.values())
