"""Limits of waiting requests: counted as what they take in memory, bounded for all together and for each tenant."""

import json
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import zstandard
from sqlmodel import func, select

from skyrl.tinker.database.tables import RequestRow
from skyrl.tinker.operations.table import OPERATIONS
from skyrl.tinker.requests import samples, training
from skyrl.tinker.requests.replay import ANY_SIZE
from skyrl.tinker.wire.parsing import Body, Limits, ModelAddress
from skyrl.tinker.wire.proto import skyrl_tinker_pb2 as pb
from tests.backends.clock import Clock
from tests.fakes import POISON
from tests.tinker.harness import BASE_MODEL, PROTOBUF, LiveServer, pass_request, sample_request, wait_until_ready
from tests.traced import least
from tests.waiting import until

MIB = 2**20
FAR = {"max_tokens": 10**8, "temperature": 0.0, "stop": []}
ENDLESS_BACKEND = {"max_context_length": 10**9, "burst_s": 0.005}


def post_pass(server: LiveServer, model: str, seq_id: int, rows: list[list[int]]) -> httpx.Response:
    """Send a forward_backward, compressed."""
    body = zstandard.compress(pass_request(model, seq_id, rows).SerializeToString())
    return server.http.post(
        "/forward_backward", content=body, headers={"Content-Type": PROTOBUF, "Content-Encoding": "zstd"}
    )


def accepted(send: Callable[[int], httpx.Response], most: int = 100) -> int:
    """Return the number of requests that are taken before one is turned away."""
    for number in range(most):
        response = send(number)
        if response.status_code != 200:
            assert is_turned_away(response), response.text
            return number
    return most


def is_turned_away(response: httpx.Response) -> bool:
    """For want of room: for now, or for good if what waits is known to wait for what the client sends later."""
    what = {429: "send this one again in a second", 400: "bytes of requests that wait for an earlier one"}
    return response.status_code in what and what[response.status_code] in response.json()["detail"]


# -- what a request counts for ----------------------------------------------------------------------------------------


def with_inputs(rows: int, length: int, names: int) -> bytes:
    request = pass_request("m", 1, [[1] * length] * rows)
    for datum in request.data:
        for number in range(names):
            tensor = datum.loss_fn_inputs[f"input_{number}"]
            tensor.dense, tensor.dtype = np.zeros(length, "<f4").tobytes(), pb.DTYPE_FLOAT32
    return request.SerializeToString()


def sparse(rows: int, length: int, k: int) -> bytes:
    request = pass_request("m", 1, [[1] * length] * rows)
    for datum in request.data:
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.ClearField("dense")
        targets.sparse_csr.crow_indices = np.zeros(length + 1, "<i8").tobytes()
        targets.ClearField("shape")
        targets.shape.extend([length, k])
    return request.SerializeToString()


MODEL = {"session_id": "s", "model_seq_id": 0, "base_model": "b"}
SAVE = {"model_id": "m", "seq_id": 1, "path": "x"}
BODIES = {
    "long sequences": ("forward_backward", partial(with_inputs, 100, 5000, 0)),
    "one token each": ("forward_backward", partial(with_inputs, 4000, 1, 0)),
    "many inputs": ("forward_backward", partial(with_inputs, 500, 3, 8)),
    "sparse targets": ("forward_backward", partial(sparse, 10, 1000, 200)),
    "empty lists": ("create_model", lambda: json.dumps({**MODEL, "user_metadata": {"a": [[]] * 100_000}}).encode()),
    "names": (
        "save_weights",
        lambda: json.dumps({**SAVE, "user_metadata": dict.fromkeys(map(str, range(50_000)), "")}),
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_request_counts_for_at_least_what_it_takes(name):
    kind, make = BODIES[name]
    data = make()
    body = Body(data.encode() if isinstance(data, str) else data, PROTOBUF if kind == "forward_backward" else "")
    parse = partial(OPERATIONS[kind].parse, body, Limits(256 * MIB))
    parsed = parse()
    assert parsed.request is not None, parsed.error

    def taken() -> int:
        tracemalloc.start()
        again = parse()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert again.held_bytes == parsed.held_bytes
        return size

    counted = training.OVERHEAD_BYTES + parsed.held_bytes
    assert least(taken, counted) <= counted


@pytest.mark.full
def test_a_request_that_was_taken_under_other_limits_is_read_again_whatever_they_are_now():
    body = Body(with_inputs(6000, 1, 8), PROTOBUF)
    parse = OPERATIONS["forward_backward"].parse
    assert "parts; send fewer" in parse(body, Limits(256 * MIB)).error
    assert parse(body, ANY_SIZE).error == ""


WEIGHTS = '{"weights": {"data": [1.0], "dtype": "float32"}}'
DATUMS = ", ".join([f'{{"model_input": {{"chunks": [{{"tokens": [1]}}]}}, "loss_fn_inputs": {WEIGHTS}}}'] * 12_000)
LARGE_JSON = {
    "forward": f'{{"forward_input": {{"data": [{DATUMS}], "loss_fn": "cross_entropy"}}, "model_id": "m", "seq_id": 1}}',
    "optim_step": '{"model_id": "m", "seq_id": 1, "adam_params": {%s"beta1": 0.9}}' % ('"beta1": 0.9, ' * 2**17),
}


@pytest.mark.parametrize("kind", LARGE_JSON)
def test_json_of_more_than_is_read_now_has_its_address_and_is_read_again_if_it_was_taken(kind):
    body, parse = Body(LARGE_JSON[kind].encode()), OPERATIONS[kind].parse
    parsed = parse(body, Limits(256 * MIB))
    assert parsed.address == ModelAddress(model_id="m", seq_id=1)
    assert "send less in one request" in parsed.error and not parsed.is_pass
    assert "send less in one request" not in parse(body, ANY_SIZE).error


def test_compressed_requests_that_wait_count_as_what_they_stand_for(own_server, monkeypatch):
    monkeypatch.setattr(training, "MAX_PENDING_BYTES", 8 * MIB)
    model = own_server.model()
    rows = [[1] * 1000] * 90  # a little more than a mebibyte, sent as a few hundred bytes
    assert accepted(lambda number: post_pass(own_server, model, 2 + number, rows)) == 3


def test_a_request_that_is_turned_away_leaves_nothing_in_the_log(own_server, monkeypatch):
    monkeypatch.setattr(training, "MAX_PENDING_BYTES", MIB)
    model = own_server.model()
    first, second = (post_pass(own_server, model, seq_id, [[1] * 1000] * 40) for seq_id in (2, 3))
    assert first.status_code == 200 and is_turned_away(second)
    count = select(func.count()).select_from(RequestRow)
    assert own_server.app.state.server.service.database.read_now(lambda session: session.exec(count).one()) == 2


@pytest.mark.full
def test_a_request_that_was_turned_away_is_taken_when_there_is_room(own_server, monkeypatch):
    model = own_server.model()
    monkeypatch.setattr(training, "MAX_PENDING_BYTES", MIB)
    own_server.crash()
    rows = [[1] * 1000] * 40
    first, second = (post_pass(own_server, model, seq_id, rows) for seq_id in (1, 2))
    assert (first.status_code, second.status_code) == (200, 429)
    own_server.recover()
    own_server.pass_result(first.json()["request_id"])
    own_server.pass_result(post_pass(own_server, model, 2, rows).json()["request_id"])


@pytest.mark.full
def test_requests_that_wait_count_the_same_after_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "MAX_PENDING_BYTES", MIB)
    rows = [[1] * 1000] * 40
    with LiveServer(tmp_path) as server:
        model = server.model()
        assert accepted(lambda number: post_pass(server, model, 2 + number, rows)) == 1
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        assert is_turned_away(post_pass(server, model, 3, rows))


def with_targets(cells: int) -> dict:
    return {"target_prompt_logprobs": {"data": [1] * (2 * cells), "dtype": "int64", "shape": [2, cells]}}


@pytest.mark.full
def test_samples_that_wait_count_as_their_prompts_and_targets(own_server, monkeypatch):
    monkeypatch.setattr(samples, "MAX_PENDING_BYTES", 8 * MIB)
    sampler = own_server.sampler(own_server.session(), 0, base_model=BASE_MODEL)
    own_server.crash()
    large = with_targets(MIB // 8)  # a mebibyte of token ids
    assert accepted(lambda number: own_server.post("/asample", sample_request(sampler, number, **large))) == 3
    own_server.recover()
    for number in range(4):
        own_server.sample(sampler, number, **large)


# -- tenants ----------------------------------------------------------------------------------------------------------

TENANTS = ("tml-a", "tml-b", "tml-c")


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[LiveServer]:
    """A server with keys, with room for samples that never end."""
    with LiveServer(tmp_path, api_keys=TENANTS, backend_config=ENDLESS_BACKEND) as server:
        speak_as(server, TENANTS[0])
        wait_until_ready(server)
        yield server


def speak_as(server: LiveServer, tenant: str) -> None:
    server.http.headers["X-API-Key"] = tenant


def passes_until_full(server: LiveServer, tenant: str) -> int:
    """Return the number of passes waiting for an earlier one that are taken of a tenant."""
    speak_as(server, tenant)
    model = server.model()
    return accepted(lambda number: post_pass(server, model, 2 + number, [[1] * 1000] * 90))


def samples_until_full(server: LiveServer, tenant: str, **options) -> int:
    """Return the number of samples that never end that are taken of a tenant."""
    speak_as(server, tenant)
    sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
    return accepted(
        lambda number: server.post("/asample", sample_request(sampler, number, sampling_params=FAR, **options))
    )


@pytest.mark.full
def test_passes_that_wait_for_ever_leave_room_to_other_tenants(tenants, monkeypatch):
    monkeypatch.setattr(training, "MAX_PENDING_BYTES", 8 * MIB)
    assert [passes_until_full(tenants, tenant) for tenant in TENANTS[:2]] == [3, 2]
    speak_as(tenants, TENANTS[1])
    model = tenants.model()
    tenants.train(model, 1)


@pytest.mark.full
def test_the_number_of_samples_that_wait_is_bounded_by_tenant(tenants, monkeypatch):
    monkeypatch.setattr(samples, "MAX_PENDING_SAMPLES", 8)
    assert [samples_until_full(tenants, tenant) for tenant in TENANTS] == [4, 2, 1]


@pytest.mark.full
def test_the_bytes_of_samples_that_wait_are_bounded_by_tenant(tenants, monkeypatch):
    monkeypatch.setattr(samples, "MAX_PENDING_BYTES", 8 * MIB)
    large = with_targets(MIB // 8)
    assert [samples_until_full(tenants, tenant, **large) for tenant in TENANTS[:2]] == [3, 2]


# -- room that comes back ---------------------------------------------------------------------------------------------


def cancel(server: LiveServer, request_id: str) -> None:
    assert server.post("/cancel_future", {"request_id": request_id}).status_code == 204


def kill_engines(server: LiveServer, request_id: str) -> None:
    crash_record = server.app.state.server.service.crash_record
    while server.poll(request_id).status_code == 408:
        server.crash()
        server.recover()
        until(
            lambda: request_id in crash_record.running or server.poll(request_id).status_code != 408,
            "the sample runs, or has failed",
        )


ENDS: dict[str, tuple[dict, Callable[[LiveServer, str], object]]] = {
    "finished": ({}, LiveServer.outcome),
    "failed": ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [POISON]}]}}, LiveServer.failure),
    "refused": ({"num_samples": 0}, LiveServer.failure),
    "cancelled": ({"sampling_params": FAR}, cancel),
    "too often with an engine that was killed": ({"sampling_params": FAR}, kill_engines),
}


@pytest.mark.full
@pytest.mark.gate("failed", "refused")
@pytest.mark.parametrize("end", ENDS)
def test_the_room_of_a_sample_comes_back_when_it_has(tenants, monkeypatch, end):
    options, await_end = ENDS[end]
    monkeypatch.setattr(samples, "MAX_PENDING_SAMPLES", 2)
    sampler = tenants.sampler(tenants.session(), 0, base_model=BASE_MODEL)
    await_end(tenants, tenants.submit_sample(sampler, 0, **options)["request_id"])
    assert samples_until_full(tenants, TENANTS[0]) == 1


@pytest.mark.full
def test_the_room_of_training_requests_comes_back_however_they_end(own_server, monkeypatch):
    monkeypatch.setattr(training, "MAX_PENDING_BYTES", 3 * MIB)
    rows = [[1] * 1000] * 90
    model = own_server.model()
    ends = [
        (rows, own_server.pass_result),
        ([[POISON] * 1000] * 80, own_server.failure),
        ([[10**6] * 1000] * 80, own_server.failure),
        (rows, own_server.pass_result),
    ]
    for seq_id, (sent, await_end) in enumerate(ends, 1):
        again = [post_pass(own_server, model, seq_id, sent) for _ in range(2)]
        await_end(again[0].json()["request_id"])
    own_server.run("/unload_model", {"model_id": model})
    own_server.failure(post_pass(own_server, model, 5, rows).json()["request_id"])
    model = own_server.model()
    assert accepted(lambda number: post_pass(own_server, model, 2 + number, rows)) == 1


# -- batches in several requests, the first of which comes last -------------------------------------------------------


def send_held(server: LiveServer, model: str, seq_id: int) -> httpx.Response:
    """A pass of a little more than a mebibyte that waits for an earlier one, and is known to."""
    response = post_pass(server, model, seq_id, [[1] * 1000] * 90)
    if response.status_code == 200:
        request_id = response.json()["request_id"]
        until(lambda: "queue_state_reason" in server.poll(request_id).json(), "the engine holds the pass")
    return response


@pytest.mark.full
def test_a_batch_that_can_never_fit_is_refused_at_once_with_the_number(own_server, monkeypatch):
    monkeypatch.setattr(training, "MAX_PENDING_BYTES", 8 * MIB)
    model = own_server.model()
    answers = [send_held(own_server, model, seq_id) for seq_id in range(2, 6)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 400]
    assert f"(limit {4 * MIB})" in answers[-1].json()["detail"]


@pytest.mark.full
def test_the_first_request_of_a_batch_is_let_in_though_the_others_fill_the_room(own_server, monkeypatch):
    monkeypatch.setattr(training, "MAX_PENDING_BYTES", 8 * MIB)
    model = own_server.model()
    held = [send_held(own_server, model, seq_id) for seq_id in range(2, 5)]
    first = post_pass(own_server, model, 1, [[1] * 1000] * 90)
    assert first.status_code == 200, first.text
    for response in [first, *held]:
        own_server.pass_result(response.json()["request_id"])


@pytest.mark.full
def test_requests_that_others_wait_for_are_let_in_though_two_models_wait(own_server, monkeypatch):
    monkeypatch.setattr(training, "MAX_PENDING_BYTES", 8 * MIB)
    models = [own_server.model(), own_server.model()]
    held = [send_held(own_server, model, seq_id) for model, seq_id in [(models[0], 2), (models[1], 2), (models[0], 3)]]
    assert post_pass(own_server, models[1], 3, [[1] * 1000] * 90).status_code == 429
    for model, waiting in zip(models, ([held[0], held[2]], [held[1]]), strict=True):
        first = post_pass(own_server, model, 1, [[1] * 1000] * 90)
        assert first.status_code == 200, first.text
        for response in [first, *waiting]:
            own_server.pass_result(response.json()["request_id"])


@pytest.mark.full
def test_a_batch_waits_for_a_request_that_is_turned_away_while_others_have_the_room(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "MAX_PENDING_BYTES", 8 * MIB)
    monkeypatch.setattr("skyrl.tinker.engine.loop.time", SimpleNamespace(monotonic=(clock := Clock())))
    with LiveServer(tmp_path, api_keys=TENANTS, gap_timeout_s=10) as server:
        models, held = {}, {}
        for tenant in TENANTS[:2]:
            speak_as(server, tenant)
            wait_until_ready(server)
            models[tenant] = server.model()
            held[tenant] = [send_held(server, models[tenant], seq_id) for seq_id in (2, 3)]
        sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
        for number in range(4):
            for tenant, model in models.items():
                speak_as(server, tenant)
                assert post_pass(server, model, 4, [[1] * 1000] * 90).status_code == 429
            server.sample(sampler, number)  # behind what the engine is told of those two
            clock.now += 6
        for tenant, model in models.items():
            speak_as(server, tenant)
            first = post_pass(server, model, 1, [[1] * 1000] * 90)
            for response in [first, *held[tenant]]:
                server.pass_result(response.json()["request_id"])


@pytest.mark.full
def test_requests_that_come_in_reverse_are_bounded_too(own_server, monkeypatch):
    monkeypatch.setattr(training, "MAX_PENDING_BYTES", 8 * MIB)
    model = own_server.model()
    answers = [send_held(own_server, model, seq_id).status_code for seq_id in range(20, 12, -1)]
    assert 400 in answers and answers.count(200) <= 6
