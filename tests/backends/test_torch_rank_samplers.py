"""Workers that each have the whole base model sample a share of the requests each, as one process would."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
from torch_models import VOCAB, make_model
from waiting import BOUND_S

from driver import create, finish_all, publish, sampling, train
from skyrl.backends.common.sampling.rank_samplers import RankSamplers
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.errors import BackendLost
from skyrl.types import SampleOutput

SIZES = {
    "max_lora_rank": 8,
    "max_lora_adapters": 4,
    "max_context_length": 64,
    "kv_cache_gib": 0.01,
    "sample_max_num_sequences": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


def opened(folder: Path, versions: Path, **options) -> TorchBackend:
    """A backend with an adapter that is published as `v`."""
    backend = TorchBackend(str(folder), TorchBackendConfig(**SIZES, **options))
    create(backend, seed=3)
    train(backend, seed=5)
    publish(backend, "v", versions)
    return backend


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    backend = opened(folder, tmp_path_factory.mktemp("alone") / "v")
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def ranks(folder, tmp_path_factory):
    backend = opened(folder, tmp_path_factory.mktemp("ranks") / "v", workers="processes", num_workers=2, fsdp_size=1)
    assert isinstance(backend.sampler, RankSamplers)
    yield backend
    backend.close()


def asked() -> list:
    """Requests of the base model and of an adapter, with and without scores of their prompts."""
    draw = np.random.default_rng(0)
    return [
        sampling(
            ["v", None][number % 2],
            num_samples=1 + number % 3,
            prompt=draw.integers(0, VOCAB, 5 + 4 * number),
            seed=number,
            max_tokens=9,
            temperature=[1.0, 0.5, 0.0][number % 3],
        )
        for number in range(7)
    ]


@pytest.mark.full
def test_samples_are_those_of_one_process_and_every_rank_draws_some(ranks, alone):
    found, wanted = [], []
    for backend, outputs in ((ranks, found), (alone, wanted)):
        requests = asked()
        results = finish_all(backend, requests)
        outputs += [results[request.request_id] for request in requests]
    for one, other in zip(found, wanted, strict=True):
        assert isinstance(one, SampleOutput) and isinstance(other, SampleOutput)
        for mine, theirs in zip(one.sequences, other.sequences, strict=True):
            np.testing.assert_array_equal(mine.tokens, theirs.tokens)
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=2e-5)
    drawn = [sampler.tokens_generated for sampler in ranks.sampler._samplers]
    assert min(drawn) > 0
    assert ranks.sampler.statistics["decode_tokens"] == sum(drawn)


def test_requests_that_begin_alike_are_shared_out_and_cancelled_ones_make_room(ranks):
    requests = [sampling("v", prompt=[1, 2, 3], seed=seed, max_tokens=20) for seed in range(8)]
    for request in requests:
        ranks.submit(request)
    ranks.wait()
    ranks.step()
    assert [ranks.sampler._load[place] for place in range(2)] == [4, 4]
    for request in requests[:4]:
        ranks.cancel(request.request_id)
    left = {request.request_id for request in requests[4:]}
    ended: set[str] = set()
    while not left <= ended:
        ranks.wait()
        ended |= {completion.request_id for completion in ranks.step()}
    assert ended == left
    assert not ranks.sampler._load.total() and not ranks.sampler._places


@pytest.mark.full
def test_requests_begin_when_another_rank_has_let_go_of_slots(ranks, tmp_path):
    versions = [f"version {number}" for number in range(2 * SIZES["max_lora_adapters"])]
    for number, version in enumerate(versions):
        publish(ranks, version, tmp_path / str(number))
    left = set()
    for version in versions:
        ranks.submit(request := sampling(version, num_samples=2, max_tokens=20))
        left.add(request.request_id)
    while left:
        assert ranks.wait(60), f"{len(left)} requests wait, and nothing runs"
        left -= {completion.request_id for completion in ranks.step()}


def test_a_rank_does_not_wait_for_another_that_is_busy(ranks):
    os.kill(ranks.group.pids[1], signal.SIGSTOP)
    try:
        assert ranks.group.on(0, "free").result(timeout=60) is None
    finally:
        os.kill(ranks.group.pids[1], signal.SIGCONT)


@pytest.mark.full
def test_a_rank_that_stops_while_another_goes_on_sampling_is_noticed(folder, tmp_path):
    backend = opened(folder, tmp_path / "v", workers="processes", num_workers=2, fsdp_size=1, dispatch_timeout_s=4)
    try:
        os.kill(backend.group.pids[1], signal.SIGSTOP)
        with pytest.raises(BackendLost, match="has not ended within 4 s"):
            finish_all(backend, [sampling(None, prompt=[number] * 5, max_tokens=50) for number in range(8)])
    finally:
        backend.close()


@pytest.mark.full
def test_answers_of_one_rank_do_not_extend_the_deadline_of_another(folder, tmp_path):
    backend = opened(folder, tmp_path / "v", workers="processes", num_workers=2, fsdp_size=1, dispatch_timeout_s=2)
    group, noticed, end = backend.group, threading.Event(), time.monotonic() + BOUND_S

    def ask_rank_0() -> bool:
        """Keep rank 0 answering. Returns True if rank 1 was noticed meanwhile."""
        while not noticed.is_set() and time.monotonic() < end:
            wait([group.on(0, "free")], BOUND_S)
        return noticed.is_set()

    try:
        os.kill(group.pids[1], signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            was_noticed = pool.submit(ask_rank_0)
            with pytest.raises(BackendLost, match="has not ended within 2 s"):
                group.wait(group.on(1, "free"), "free", 1)
            noticed.set()
            assert was_noticed.result()
    finally:
        backend.close()
