"""Samples that nobody waits for any more: dropped wherever they are; nothing else is touched."""

import asyncio

import pytest
import tinker
from tinker.lib.api_future_impl import _APIFuture

from skyrl.backends.operations import Sample
from skyrl.tinker.local_server import close_client
from skyrl.tinker.processes.messages import Cancel, Enqueue
from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready
from tests.waiting import BOUND_S, until

ENDLESS_BACKEND = {"max_context_length": 10**9, "burst_s": 0.005}
ENDLESS = {"max_tokens": 10**8, "temperature": 0.0, "stop": []}


@pytest.fixture
def server(tmp_path):
    """With room for samples that never end by themselves."""
    with LiveServer(tmp_path, backend_config=ENDLESS_BACKEND) as server:
        wait_until_ready(server)
        yield server


@pytest.fixture
def sampler(server) -> str:
    return server.sampler(server.session(), 0, base_model=BASE_MODEL)


def cancelled(server: LiveServer) -> list[str]:
    return [frame.request_id for frame in server.engine.sent if isinstance(frame, Cancel)]


def arrived(server: LiveServer) -> list[str]:
    """Samples that the engine was given."""
    operations = [frame.operation for frame in server.engine.sent if isinstance(frame, Enqueue)]
    return [operation.request_id for operation in operations if isinstance(operation, Sample)]


@pytest.fixture
def awaited(monkeypatch) -> list[str]:
    """Requests whose ends the SDK waits for: it knows their ids, without which it cannot cancel them."""
    requests: list[str] = []
    wait = _APIFuture._result_async

    async def noting(self: _APIFuture, *arguments):
        requests.append(self.request_id)
        return await wait(self, *arguments)

    monkeypatch.setattr(_APIFuture, "_result_async", noting)
    return requests


def cancel(server: LiveServer, request_id: str, **options) -> int:
    return server.post("/cancel_future", {"request_id": request_id}, **options).status_code


def test_a_running_sample_is_dropped_and_its_future_fails(server, sampler):
    request_id = server.submit_sample(sampler, 0, sampling_params=ENDLESS)["request_id"]
    assert cancel(server, request_id) == 204
    assert cancelled(server) == [request_id]
    assert server.failure(request_id) == {"error": "the sample was cancelled by its client", "category": "user"}


def test_what_is_left_is_worked_on_without_the_dropped_ones(server, sampler):
    ids = [server.submit_sample(sampler, i, sampling_params=ENDLESS)["request_id"] for i in range(5)]
    for request_id in ids:
        cancel(server, request_id)
    server.sample(sampler, 5)
    server.on_loop(server.engine.stop())  # the backend has nothing left, so its loop ends


def test_a_sample_that_waits_for_an_engine_is_never_run(server, sampler):
    server.crash()
    request_id = server.submit_sample(sampler, 0, sampling_params=ENDLESS)["request_id"]
    cancel(server, request_id)
    server.recover()
    assert server.failure(request_id)["category"] == "user"
    server.sample(sampler, 1)


def test_a_cancelled_sample_is_not_started_again_by_its_duplicate(server, sampler):
    first = server.submit_sample(sampler, 0, sampling_params=ENDLESS)
    cancel(server, first["request_id"])
    assert server.submit_sample(sampler, 0, sampling_params=ENDLESS) == first


def test_cancelling_twice_or_what_is_finished_or_unknown_changes_nothing(server, sampler):
    request_id = server.submit_sample(sampler, 0)["request_id"]
    result = server.outcome(request_id).content
    for name in (request_id, request_id, "sample-nobody", "nonsense"):
        assert cancel(server, name) == 204
    assert server.outcome(request_id).content == result
    assert cancelled(server) == []


def test_training_requests_are_not_cancelled(server):
    model = server.model()
    request_id = server.submit_pass(model, 2)  # waits for its predecessor
    assert cancel(server, request_id) == 204
    server.submit_pass(model, 1)
    assert server.pass_result(request_id).metrics["loss:sum"] is not None
    assert cancelled(server) == []


def test_samples_of_other_keys_are_not_cancelled(tmp_path):
    options = {"api_keys": ["tml-test", "tml-other"], "backend_config": ENDLESS_BACKEND}
    with LiveServer(tmp_path, **options) as server:
        wait_until_ready(server)
        sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
        request_id = server.submit_sample(sampler, 0, sampling_params=ENDLESS)["request_id"]
        assert cancel(server, request_id, headers={"X-API-Key": "tml-other"}) == 204
        assert server.poll(request_id).status_code == 408
        cancel(server, request_id)
        assert cancelled(server) == [request_id]


@pytest.fixture
def client(server):
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    yield client.create_sampling_client(base_model=BASE_MODEL).result()
    close_client(client)


def endless(client: tinker.SamplingClient):
    params = tinker.SamplingParams(max_tokens=10**8, temperature=0.0, stop=[])
    return client.sample(tinker.ModelInput.from_ints([1, 2, 3]), 1, params)


def test_samples_that_time_out_in_asyncio_leave_the_engine(server, client, awaited):
    number, timeouts = 30, list[asyncio.Timeout]()

    async def one():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(BOUND_S) as timeout:
                timeouts.append(timeout)
                await endless(client)

    async def run():
        samples = asyncio.gather(*[one() for _ in range(number)])
        await asyncio.to_thread(
            until, lambda: set(awaited) == set(arrived(server)) and len(awaited) == number, "all samples run"
        )
        for timeout in timeouts:
            timeout.reschedule(asyncio.get_running_loop().time())
        await samples

    asyncio.run(run())
    until(lambda: sorted(cancelled(server)) == sorted(arrived(server)), "all samples are cancelled")
    assert len(cancelled(server)) == number


def test_a_sample_that_finishes_in_time_is_not_cancelled(server, client):
    async def run():
        params = tinker.SamplingParams(max_tokens=4, stop=[])
        await asyncio.wait_for(client.sample(tinker.ModelInput.from_ints([1]), 1, params), BOUND_S)

    asyncio.run(run())
    assert cancelled(server) == []
