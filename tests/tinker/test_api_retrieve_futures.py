"""`retrieve_futures`: the ends of a client's samples, each told until it is acknowledged; `join_sampling_session`."""

import pytest

from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready

CLONE = 7 * 10**9


@pytest.fixture
def sampler(server) -> str:
    return server.sampler(server.session(), 0, base_model=BASE_MODEL)


def poll(server: LiveServer, sampler: str, cursor: int = 0, client: int = 0, **options) -> tuple[list[dict], int]:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": client}
    answer = server.ok("/retrieve_futures", {"target": target, "prev_cursor": cursor, "timeout": 0.0} | options)
    return answer["completions"], answer["cursor"]


def told(server: LiveServer, sampler: str, cursor: int = 0, client: int = 0, **options) -> list[str]:
    return [end["request_id"] for end in poll(server, sampler, cursor, client, **options)[0]]


def finished(server: LiveServer, sampler: str, seq_id: int, **options) -> str:
    request_id = server.submit_sample(sampler, seq_id, **options)["request_id"]
    server.outcome(request_id)
    return request_id


def test_ends_are_told_in_their_order_until_they_are_acknowledged(server, sampler):
    ids = [finished(server, sampler, i) for i in range(3)]
    ends, cursor = poll(server, sampler)
    assert [end["request_id"] for end in ends] == ids
    assert told(server, sampler) == ids
    ids.append(finished(server, sampler, 3))
    later, higher = poll(server, sampler, cursor)
    assert ([end["request_id"] for end in later], higher > cursor) == (ids[3:], True)
    assert told(server, sampler, higher) == []
    assert told(server, sampler, cursor) == []


def test_a_finished_sample_has_the_size_of_its_result(server, sampler):
    request_id = finished(server, sampler, 0)
    size = len(server.outcome(request_id).content)
    expected = {"state": "finished", "request_id": request_id, "response_payload_uncompressed_size": size}
    assert poll(server, sampler)[0] == [expected]


def test_samples_that_fail_or_are_refused_or_cancelled_have_failed(server, sampler):
    refused = finished(server, sampler, 0, num_samples=0)
    poisoned = finished(server, sampler, 1, prompt={"chunks": [{"tokens": [13]}]})
    assert poll(server, sampler)[0] == [{"state": "failed", "request_id": name} for name in (refused, poisoned)]


def test_clients_of_a_sampler_are_told_of_their_own_samples(server, sampler):
    ids = [finished(server, sampler, seq_id) for seq_id in (0, CLONE, CLONE + 10**9 - 1, CLONE + 10**9)]
    assert [told(server, sampler, client=number) for number in (0, 7, 8, 9)] == [ids[:1], ids[1:3], ids[3:], []]


def test_a_poll_waits_for_an_end_as_long_as_it_may(server, sampler):
    request = {"target": {"sampling_session_id": sampler}, "timeout": 60}
    answers = server.at_once(
        lambda: [server.ok("/retrieve_futures", request) for _ in range(3)],
        lambda: server.submit_sample(sampler, 0),
    )
    assert any(answer["completions"] for answer in [*answers[0], server.ok("/retrieve_futures", request)])


def test_results_that_were_retrieved_are_freed_and_others_stay(server, sampler):
    first, second = (finished(server, sampler, i) for i in range(2))
    other = finished(server, server.sampler(server.session(), 0, base_model=BASE_MODEL), 0)
    model = server.model()
    names = [first, first, other, model, "sample-nobody"]
    assert told(server, sampler, retrieved_request_ids=names) == [second]
    assert [server.poll(name).status_code for name in (first, second, other)] == [410, 200, 200]


def test_cursors_go_on_above_the_last_servers_where_the_clock_was_set_back(own_server, monkeypatch):
    before = own_server.app.state.server.queue.futures.completions.cursor
    monkeypatch.setattr("time.time_ns", lambda: (before - 3600 * 10**6) * 1000)
    own_server.__exit__()
    own_server.__enter__()
    wait_until_ready(own_server)
    assert own_server.app.state.server.queue.futures.completions.cursor > before + 20_000


def test_pending_samples_are_not_freed(own_server):
    sampler = own_server.sampler(own_server.session(), 0, base_model=BASE_MODEL)
    own_server.crash()
    request_id = own_server.submit_sample(sampler, 0)["request_id"]
    poll(own_server, sampler, retrieved_request_ids=[request_id])
    own_server.recover()
    assert own_server.outcome(request_id).status_code == 200


def test_large_results_are_announced_only_where_that_is_allowed(tmp_path):
    with LiveServer(tmp_path, backend_config={"max_context_length": 20_000}) as server:
        wait_until_ready(server)
        sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
        prompt = {"chunks": [{"tokens": [1] * 19_000}]}
        large = finished(server, sampler, 0, prompt=prompt, topk_prompt_logprobs=64)
        small = finished(server, sampler, 1)
        size = len(server.outcome(large).content)
        announced = server.ok("/retrieve_future", {"request_id": large, "allow_metadata_only": True})
        assert announced == {"status": "complete_metadata", "response_payload_size": size}
        answer = server.post("/retrieve_future", {"request_id": small, "allow_metadata_only": True})
        assert "sequences" in answer.json()


@pytest.mark.parametrize(
    "change",
    [
        {"target": None},
        {"prev_cursor": -1},
        {"prev_cursor": 2**63},
        {"timeout": -1},
        {"timeout": "soon"},
        {"retrieved_request_ids": "sample-1"},
        {"target": {"sampling_session_id": "s", "cloned_sampler_id": -1}},
    ],
)
def test_polls_that_make_no_sense_are_400(server, sampler, change):
    body = {"target": {"sampling_session_id": sampler}} | change
    response = server.post("/retrieve_futures", body)
    assert response.status_code == 400 and next(iter(change)) in response.json()["detail"]


def test_a_cursor_of_another_server_means_that_nothing_was_seen(server, sampler):
    request_id = finished(server, sampler, 0)
    assert told(server, sampler, 2**62) == [request_id]


def test_ends_of_results_that_made_room_for_others_are_still_told(own_server):
    sampler = own_server.sampler(own_server.session(), 0, base_model=BASE_MODEL)
    own_server.app.state.server.queue.futures._max_bytes = 1
    ids = [finished(own_server, sampler, i) for i in range(3)]
    assert told(own_server, sampler) == ids
    assert [own_server.poll(name).status_code for name in ids] == [410, 410, 200]


@pytest.mark.full
@pytest.mark.parametrize("client", [0, 7])
@pytest.mark.parametrize("last", [0, 2500])
def test_samples_lost_in_a_restart_are_told_as_failed_and_are_gone(tmp_path, client, last):
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
        finished(server, sampler, client * 10**9)
        _, cursor = poll(server, sampler, client=client)
        server.crash()
        seq_ids = [client * 10**9 + seq_id for seq_id in {1, max(1, last)}]
        pending = [server.submit_sample(sampler, seq_id)["request_id"] for seq_id in seq_ids]
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        alive = finished(server, sampler, client * 10**9 + 5)
        ends, new_cursor = poll(server, sampler, cursor, client)
        states = {end["request_id"]: end["state"] for end in ends}
        assert [states[name] for name in pending] == ["failed"] * len(pending)
        assert [server.poll(name).status_code for name in pending] == [410] * len(pending)
        assert states[alive] == "finished"
        assert told(server, sampler, new_cursor, client) == []


@pytest.mark.full
def test_a_client_that_had_not_polled_before_a_restart_is_told_too(tmp_path):
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
        server.crash()
        pending = server.submit_sample(sampler, 0)["request_id"]
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        assert pending in told(server, sampler)


@pytest.mark.full
def test_a_sampler_made_after_the_restart_has_lost_nothing(tmp_path):
    for _ in range(2):
        with LiveServer(tmp_path) as server:
            wait_until_ready(server)
            assert told(server, server.sampler(server.session(), 0, base_model=BASE_MODEL)) == []


@pytest.mark.full
def test_joining_clients_get_numbers_of_their_own_across_a_restart(tmp_path):
    def join(server: LiveServer) -> int:
        return server.ok("/join_sampling_session", {"sampling_session_id": sampler})["client_counter"]

    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
        numbers = server.at_once(*[lambda: join(server)] * 8)
    with LiveServer(tmp_path) as server:
        numbers.append(join(server))
    assert sorted(numbers) == list(range(1, 10))
