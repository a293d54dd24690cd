"""The SDK's client that waits for all of its samples at once, and clients that are copied to other processes."""

import multiprocessing
import pickle

import pytest
import tinker

from skyrl.tinker.local_server import close_client, reserve_port
from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready
from tests.waiting import BOUND_S, until

PROMPT = tinker.ModelInput.from_ints([1, 2, 3])
PARAMS = tinker.SamplingParams(max_tokens=4, temperature=0.0, stop=[])


def connect(server: LiveServer, together: bool) -> tinker.ServiceClient:
    """A client that waits for its samples `together`, which this server asks of clients and others do not."""
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    config = client.holder.get_client_config().model_copy(update={"sample_use_retrieve_futures": together})
    client.holder._client_config = config
    return client


def sampled(sampler: tinker.SamplingClient, count: int = 1) -> list[list[int]]:
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(count)]
    return [future.result().sequences[0].tokens for future in futures]


@pytest.mark.full
def test_samples_waited_for_together_are_those_waited_for_one_by_one(server):
    results = []
    for together in (True, False):
        client = connect(server, together)
        sampler = client.create_sampling_client(base_model=BASE_MODEL).result()
        results.append(sampled(sampler, 50))
        assert (sampler._futures_poller is not None) == together
        close_client(client)
    assert results[0] == results[1]


def test_a_failure_is_raised_to_whoever_waits_for_it(server):
    client = connect(server, True)
    sampler = client.create_sampling_client(base_model=BASE_MODEL).result()
    bad = sampler.sample(PROMPT, 1, PARAMS, prompt_alt_tokens_k=1000)
    assert len(sampled(sampler, 2)) == 2
    with pytest.raises(tinker.RequestFailedError, match="prompt_alt_tokens_k=1000"):
        bad.result()
    close_client(client)


@pytest.mark.full
@pytest.mark.parametrize("together", [True, False])
def test_a_restarted_server_gets_the_samples_that_it_lost_again(tmp_path, together):
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        with LiveServer(tmp_path, port=port) as server:
            wait_until_ready(server)
            client = connect(server, together)
            sampler = client.create_sampling_client(base_model=BASE_MODEL).result()
            (expected,) = sampled(sampler)
            server.crash()
            pending = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(10)]
            waiting = server.app.state.server.queue.samples
            until(lambda: len(waiting._pending) >= 10, "the samples are pending")
        with LiveServer(tmp_path, port=port):
            assert [future.result(BOUND_S).sequences[0].tokens for future in pending] == [expected] * 10
            close_client(client)


def test_large_results_are_announced_before_they_are_sent(tmp_path):
    with LiveServer(tmp_path, backend_config={"max_context_length": 20_000}) as server:
        wait_until_ready(server)
        client = connect(server, True)
        sampler = client.create_sampling_client(base_model=BASE_MODEL).result()
        prompt = tinker.ModelInput.from_ints([1] * 19_000)
        large = [sampler.sample(prompt, 1, PARAMS, topk_prompt_logprobs=64) for _ in range(8)]
        assert {future.result().topk_prompt_logprobs_np.logprobs.shape for future in large} == {(19_000, 64)}
        close_client(client)


def _in_another_process(pickled: bytes, connection) -> None:
    """Two copies of a client sample at the same time."""
    copies = [pickle.loads(pickled) for _ in range(2)]
    futures = [copy.sample(PROMPT, 1, PARAMS) for copy in copies for _ in range(3)]
    tokens = [future.result().sequences[0].tokens for future in futures]
    connection.send((tokens, [copy._cloned_sampler_id for copy in copies]))


@pytest.mark.full
def test_clients_copied_to_other_processes_sample_under_numbers_of_their_own(server):
    client = connect(server, False)
    sampler = client.create_sampling_client(base_model=BASE_MODEL).result()
    (expected,) = sampled(sampler)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_in_another_process, args=(pickle.dumps(sampler), theirs))
    process.start()
    tokens, numbers = ours.recv()
    process.join()
    assert tokens == [expected] * 6
    assert sorted(numbers) == [1, 2]
    assert sampled(sampler, 3) == [expected] * 3
    close_client(client)
