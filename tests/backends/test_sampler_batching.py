"""Continuous batching: who runs beside whom changes nothing, and nothing is left behind."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_rig import Rig, finish, output, prompt_of, request, run, same, sequence

from skyrl.backends.jax.cache_shapes import CacheShapes
from skyrl.backends.jax.prompts import chunk_size
from skyrl.errors import RequestError
from skyrl.types import ErrorResponse, SampleOutput

TOKEN_BYTES = 256  # of the tiny model: 2 layers x (key, value) x 2 heads x 8 x 4 bytes


@pytest.fixture(scope="module")
def rig(tiny_model) -> Rig:
    return Rig.of(tiny_model)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(rig):
    yield
    assert not rig.sampler.busy
    assert rig.versions.pinned == 0


def mixed_requests(count: int) -> list:
    """Requests that differ in everything a request can choose."""
    draws = np.random.default_rng(0)
    return [
        request(
            prompt_of(int(draws.integers(1, 60)), seed),
            [None, "v0", "v1", "v2"][seed % 4],
            n=1 + seed % 3,
            seed=seed,
            max_tokens=int(draws.integers(1, 40)),
            temperature=[1.0, 0.0, 0.7][seed % 3],
            top_k=[-1, 5, 40][(seed // 2) % 3],
            top_p=[1.0, 0.8][(seed // 3) % 2],
            scores=seed % 5 == 0,
        )
        for seed in range(count)
    ]


def test_a_request_samples_the_same_alone_and_beside_others_that_come_and_go(rig):
    requests = mixed_requests(12)
    results = {}
    for i, asked in enumerate(requests):  # each joins while earlier ones are running
        rig.sampler.add(asked)
        for _ in range(i % 3):
            results |= {done.request_id: done.result for done in rig.sampler.burst()}
    results |= finish(rig.sampler)
    for asked in requests:
        (alone,) = run(rig.sampler, asked)
        assert all(map(same, alone.sequences, results[asked.request_id].sequences)), asked


def test_deterministic_samples_are_bitwise_the_same_alone_and_beside_others(rig):
    sampler = rig.make_sampler(deterministic=True, max_rows=4, max_context_length=256)
    requests = mixed_requests(8)
    together = run(sampler, *requests)
    for asked, result in zip(requests, together, strict=True):
        (alone,) = run(sampler, asked)
        for a, b in zip(alone.sequences, result.sequences, strict=True):
            assert same(a, b, atol=0)


def test_a_growing_cache_keeps_running_rows_right(rig):
    long = request(prompt_of(200), "v0", max_tokens=100, seed=1)
    short = request(prompt_of(20), "v1", max_tokens=100, seed=2, n=3)
    shapes = set()
    rig.sampler.add(long)
    rig.sampler.add(short)
    results = {}
    while rig.sampler.busy:
        results |= {done.request_id: done.result for done in rig.sampler.burst()}
        shapes.add(rig.sampler.cache_shape)
    assert {256, 512} <= {window for _, window in shapes}
    for asked, version in ((long, 0), (short, 1)):
        for sampled in results[asked.request_id].sequences:
            full = rig.full_logprobs([*asked.prompt.tolist(), *sampled.tokens.tolist()], rig.adapter(version))
            at = len(asked.prompt) - 1 + np.arange(len(sampled.tokens))
            np.testing.assert_allclose(sampled.logprobs, full[at, sampled.tokens], atol=1e-4)


def test_a_single_sample_has_a_cache_of_one_row(rig):
    rig.sampler.add(request(prompt_of(5), max_tokens=30))
    rig.sampler.burst()
    assert rig.sampler.cache_shape == (1, 256)
    finish(rig.sampler)
    assert rig.sampler.cache_shape == (0, 0)


def test_more_requests_than_rows_finish_in_order(rig):
    sampler = rig.make_sampler(max_rows=4, max_context_length=256)
    requests = [request(prompt_of(10, seed), seed=seed, max_tokens=6, n=1 + seed % 2) for seed in range(7)]
    for asked in requests:
        sampler.add(asked)
    assert list(finish(sampler)) == [asked.request_id for asked in requests]


def test_more_samples_than_rows_are_those_of_a_larger_batch(rig):
    sampler = rig.make_sampler(max_rows=4, max_context_length=256)
    few_rows = output(sampler, prompt_of(30), "v0", n=6, seed=3).sequences
    assert all(map(same, few_rows, output(rig.sampler, prompt_of(30), "v0", n=6, seed=3).sequences))


def test_a_short_request_finishes_before_a_long_one_that_came_first(rig):
    long, short = request(prompt_of(300), max_tokens=200), request(prompt_of(5), max_tokens=3)
    rig.sampler.add(long)
    rig.sampler.add(short)
    assert list(finish(rig.sampler)) == [short.request_id, long.request_id]


def test_long_requests_take_turns_when_memory_is_short(rig):
    two_long_rows = TOKEN_BYTES * 512 * 2
    sampler = rig.make_sampler(cache_bytes=two_long_rows, max_context_length=512)
    requests = [request(prompt_of(300, seed), seed=seed, max_tokens=100) for seed in range(3)]
    for asked in requests:
        sampler.add(asked)
    results = finish(sampler)
    assert list(results) == [asked.request_id for asked in requests]
    (alone,) = run(rig.sampler, requests[1])
    assert same(results[requests[1].request_id].sequences[0], alone.sequences[0])


def test_a_request_that_can_never_fit_is_refused_with_a_way_out(rig):
    sampler = rig.make_sampler(cache_bytes=TOKEN_BYTES * 256 * 2)
    with pytest.raises(RequestError, match=r"max_tokens=200 after a prompt of 100 .* at most 256; ask for fewer"):
        sampler.add(request(prompt_of(100), max_tokens=200))


@pytest.mark.parametrize("bursts", [0, 1, 3])
@pytest.mark.parametrize("length", [4, 900])
def test_a_cancelled_request_frees_everything_and_completes_nothing(rig, bursts, length):
    rig.sampler.add(request(prompt_of(length), "v0", name="cancelled", max_tokens=100, n=2))
    for _ in range(bursts):
        assert rig.sampler.burst() == []
    rig.sampler.cancel("cancelled")
    assert not rig.sampler.busy
    assert rig.versions.pinned == 0
    assert rig.sampler.cache_shape == (0, 0)


def test_cancelling_one_request_leaves_others_as_they_were(rig):
    kept = request(prompt_of(20), "v1", max_tokens=40)
    (alone,) = run(rig.sampler, kept)
    rig.sampler.add(request(prompt_of(20), "v0", name="cancelled", n=3, max_tokens=60))
    rig.sampler.add(kept)
    for _ in range(3):
        rig.sampler.burst()
    rig.sampler.cancel("cancelled")
    rig.sampler.cancel("unheard-of")
    (result,) = finish(rig.sampler).values()
    assert same(result.sequences[0], alone.sequences[0])


def test_a_lost_cache_fails_running_requests_and_the_next_ones_are_fine(rig):
    waiting = request(prompt_of(20), "v0")
    (expected,) = run(rig.sampler, waiting)
    rig.sampler.add(request(prompt_of(5), "v1", name="running", max_tokens=50))
    rig.sampler.burst()
    rig.sampler._rows._cache.keys.delete()  # what a failed program leaves of a cache that was donated to it
    rig.sampler.add(waiting)
    results = finish(rig.sampler)
    assert isinstance(results["running"], ErrorResponse)
    assert results["running"].status == "server"
    (again,) = run(rig.sampler, waiting)
    assert same(again.sequences[0], expected.sequences[0])


def test_a_lost_bank_is_rebuilt_from_the_published_versions(rig):
    asked = request(prompt_of(20), "v0")
    (expected,) = run(rig.sampler, asked)
    rig.sampler.add(request(prompt_of(5), "v1", name="running", max_tokens=50))
    rig.sampler.burst()
    jax.tree.leaves(rig.versions.bank)[0].delete()
    (failed,) = finish(rig.sampler).values()
    assert isinstance(failed, ErrorResponse)
    (again,) = run(rig.sampler, asked)
    assert same(again.sequences[0], expected.sequences[0])


actions = st.lists(
    st.one_of(
        st.just("burst"),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(
            st.sampled_from([None, "v0", "v1", "v2", "missing"]),
            st.integers(1, 40),
            st.integers(1, 20),
            st.integers(1, 5),
        ),
    ),
    max_size=25,
)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(actions=actions)
def test_after_any_workload_every_request_was_answered_once_and_nothing_is_held(rig, actions):
    names, cancelled, results = [], set(), {}

    def collect(completions):
        for done in completions:
            assert done.request_id not in results
            results[done.request_id] = done.result

    for action in actions:
        if action == "burst":
            collect(rig.sampler.burst())
        elif action[0] == "cancel":
            name = names[action[1] % len(names)] if names else "nobody"
            rig.sampler.cancel(name)
            cancelled |= {name} - results.keys()
        else:
            version, length, max_tokens, n = action
            asked = request(prompt_of(length), version, max_tokens=max_tokens, n=n)
            names.append(asked.request_id)
            rig.sampler.add(asked)
    while rig.sampler.busy:
        collect(rig.sampler.burst())
    assert results.keys() == set(names) - cancelled
    assert all(isinstance(result, SampleOutput | ErrorResponse) for result in results.values())
    assert rig.versions.pinned == 0
    assert rig.sampler.cache_shape == (0, 0)


def test_a_sequence_does_not_change_when_its_row_moves(rig):
    """The first of the rows ends, so the others are copied to a smaller cache."""
    requests = [request(prompt_of(6), seed=seed, max_tokens=4 if seed < 5 else 60) for seed in range(8)]
    together = run(rig.sampler, *requests)
    assert same(together[7].sequences[0], sequence(rig.sampler, prompt_of(6), seed=7, max_tokens=60))


@given(max_tokens=st.integers(1, 50_000), tokens=st.integers(1, 50_000), rows=st.integers(1, 40))
def test_windows_hold_what_they_are_asked_for_and_every_prompts_chunks(max_tokens, tokens, rows):
    shapes = CacheShapes.of(max_tokens=max_tokens, max_rows=0, token_bytes=1, budget_bytes=10**9)
    tokens = min(tokens, max_tokens)
    window = shapes.window(tokens)
    assert tokens <= window < max(2 * tokens, 257) + 512
    assert shapes.row_count(rows) >= min(rows, 32)
    read = 0
    while read < tokens - 1:
        size = chunk_size(tokens - 1 - read)
        assert read + size <= window
        read += size


def test_long_windows_leave_room_for_fewer_rows():
    shapes = CacheShapes.of(max_tokens=4096, max_rows=0, token_bytes=1, budget_bytes=9 * 1024)
    assert [shapes.fits(rows, 256) for rows in (16, 32)] == [True, True]
    assert [shapes.fits(rows, 1024) for rows in (8, 9)] == [True, False]
    assert shapes.longest == 4096


def test_deterministic_sampling_has_one_shape():
    shapes = CacheShapes.of(max_tokens=4096, max_rows=0, token_bytes=1, budget_bytes=9 * 4096, deterministic=True)
    assert (shapes.rows, shapes.windows) == ((8,), (4096,))
