"""Continuous batching: who runs beside whom changes nothing, and nothing is left behind."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_rig import Rig, finish, output, prompt_of, request, run, same, sequence

from skyrl.backends.common.page_table import common_prefix
from skyrl.errors import BackendLost, RequestError
from skyrl.types import ErrorResponse, SampleOutput

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
TOKEN_BYTES = 256  # of the tiny model: 2 layers x (key, value) x 2 heads x 8 x 4 bytes


@pytest.fixture(scope="module")
def rig(tiny_model) -> Rig:
    return Rig.of(tiny_model)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(rig):
    yield
    assert not rig.sampler.busy
    assert rig.versions.pinned == 0
    assert rig.sampler.pages_free == rig.sampler.pages_total


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


@pytest.mark.full
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


@pytest.mark.full
def test_more_requests_than_rows_finish_in_order(rig):
    sampler = rig.make_sampler(max_rows=4, max_context_length=256)
    requests = [request(prompt_of(10, seed), seed=seed, max_tokens=6) for seed in range(7)]
    for asked in requests:
        sampler.add(asked)
    assert list(finish(sampler)) == [asked.request_id for asked in requests]


@pytest.mark.full
def test_a_request_of_many_samples_does_not_hold_up_those_behind_it(rig):
    sampler = rig.make_sampler(max_rows=4, max_context_length=256)
    many, few = request(prompt_of(10), n=30, max_tokens=6), request(prompt_of(11), max_tokens=6)
    sampler.add(many)
    sampler.add(few)
    assert list(finish(sampler)) == [few.request_id, many.request_id]


@pytest.mark.full
def test_rows_are_shared_between_tenants_and_a_tenants_first_request_always_begins(rig):
    sampler = rig.make_sampler(max_rows=4, max_context_length=256)
    for seed in range(8):  # more than may begin at a time, each with more samples than there are rows
        sampler.add(request(prompt_of(10, seed), n=30, max_tokens=6, tenant="many"))
    for _ in range(3):
        sampler.burst()
    few = [request(prompt_of(11, seed), max_tokens=6, tenant="few") for seed in range(4)]
    for asked in few:
        sampler.add(asked)
    assert list(finish(sampler))[:4] == [asked.request_id for asked in few]


@pytest.mark.full
def test_a_prompt_that_is_in_the_cache_costs_its_tenant_nothing(rig):
    sampler = rig.make_sampler(max_rows=1, max_context_length=256)
    requests = [request(prompt_of(129, 7), max_tokens=1, tenant="same") for _ in range(40)]
    requests += [request(prompt_of(128, seed), max_tokens=1, tenant="other") for seed in range(40)]
    for asked in requests:
        sampler.add(asked)
    tenants = {asked.request_id: asked.tenant for asked in requests}
    order = [tenants[request_id] for request_id in finish(sampler)]
    assert order[:20].count("other") <= 4


def test_a_long_prompt_does_not_hold_up_those_behind_it(rig):
    long, short = request(prompt_of(900), max_tokens=1), request(prompt_of(11), max_tokens=1)
    rig.sampler.add(long)
    rig.sampler.add(short)
    assert list(finish(rig.sampler)) == [short.request_id, long.request_id]


def hits(result) -> int:
    return result.prompt_cache_hit_tokens


@pytest.mark.full
def test_a_prompt_that_was_read_is_not_read_again(rig):
    sampler = rig.make_sampler()
    first, again = (output(sampler, prompt_of(200), "v0", seed=1) for _ in range(2))
    assert (hits(first), hits(again)) == (0, 199)
    assert same(first.sequences[0], again.sequences[0])


@pytest.mark.full
def test_statistics_count_what_was_read_drawn_and_found_in_the_cache(rig):
    sampler = rig.make_sampler()
    results = [output(sampler, prompt_of(200), "v0", seed=seed, max_tokens=5, stop=[]) for seed in range(2)]
    told = sampler.statistics
    assert told["prompt_tokens_read"] == 400
    assert told["prefix_cache_hit_tokens"] == sum(map(hits, results)) == 199
    assert told["decode_tokens"] == 10
    assert 1 <= told["decode_calls"] == told["decode_sequences"] <= 10  # one after the other
    assert told["running_sequences"] == told["waiting_samples"] == told["cache_pages_used"] == 0 < told["cache_pages"]


@pytest.mark.full
def test_a_prompt_goes_on_from_what_another_has_in_common_with_it(rig):
    sampler = rig.make_sampler()
    common = prompt_of(100)
    output(sampler, common + prompt_of(30, 1), "v0")
    branch = output(sampler, [*common, 7, *prompt_of(40, 2)], "v0", seed=5)
    assert hits(branch) == 100
    alone = output(rig.make_sampler(), [*common, 7, *prompt_of(40, 2)], "v0", seed=5)
    assert same(branch.sequences[0], alone.sequences[0])


def test_an_answer_is_part_of_the_next_prompt(rig):
    sampler = rig.make_sampler()
    prompt = prompt_of(70)
    answer = output(sampler, prompt, "v0", max_tokens=50).sequences[0].tokens.tolist()
    after = output(sampler, [*prompt, *answer, 3, 4, 5], "v0", seed=2)
    assert hits(after) == 70 + 49
    alone = output(rig.make_sampler(), [*prompt, *answer, 3, 4, 5], "v0", seed=2)
    assert same(after.sequences[0], alone.sequences[0])


@pytest.mark.full
def test_requests_with_one_prompt_that_come_together_read_it_once(rig):
    sampler = rig.make_sampler()
    requests = [request(prompt_of(400), "v0", seed=seed) for seed in range(5)]
    results = run(sampler, *requests)
    assert sorted(map(hits, results)) == [0, 399, 399, 399, 399]
    alone = output(rig.make_sampler(), prompt_of(400), "v0", seed=4)
    assert same(results[4].sequences[0], alone.sequences[0])


def test_tokens_are_compared_a_few_times_however_many_prompts_are_read_together(rig, monkeypatch):
    """Of 24 prompts with three beginnings: at most twice each, not in every turn with all others."""
    compared = 0

    def counting(a, b):
        nonlocal compared
        compared += min(len(a), len(b))
        return common_prefix(a, b)

    for module in ("page_table", "sampling.prefill_queue"):
        monkeypatch.setattr(f"skyrl.backends.common.{module}.common_prefix", counting)
    sampler = rig.make_sampler(max_rows=32)
    asked = [request(prompt_of(300, seed % 3) + [seed] * 300, "v0", max_tokens=1) for seed in range(24)]
    assert sorted(map(hits, run(sampler, *asked))) == [0] * 3 + [300] * 21
    assert 0 < compared <= 2 * 24 * 600


@pytest.mark.full
@pytest.mark.parametrize("other", [{"tenant": "b"}, {"version": "v1"}, {"version": None}])
def test_nothing_is_shared_between_tenants_or_versions(rig, other):
    sampler = rig.make_sampler()
    own = {"version": "v0", "tenant": "a"}
    run(sampler, request(prompt_of(200), **own))
    (result,) = run(sampler, request(prompt_of(200), **(own | other)))
    assert hits(result) == 0


@pytest.mark.full
def test_a_name_that_is_published_again_shares_nothing_with_what_it_was(rig):
    pool = rig.pool()
    sampler = rig.make_sampler(pool)
    pool.publish("name", rig.adapter(0))
    output(sampler, prompt_of(100), "name")
    pool.publish("name", rig.adapter(1))
    fresh = output(sampler, prompt_of(100), "name")
    assert hits(fresh) == 0
    assert same(fresh.sequences[0], sequence(rig.sampler, prompt_of(100), "v1"))


@pytest.mark.full
def test_tokens_that_are_scored_are_computed(rig):
    sampler = rig.make_sampler()
    output(sampler, prompt_of(200), "v0")
    scored = output(sampler, prompt_of(200), "v0", scores=True)
    some = output(sampler, prompt_of(200), "v0", scores=True, last_n=50)
    assert (hits(scored), hits(some)) == (0, 149)
    np.testing.assert_allclose(some.prompt_logprobs[-50:], scored.prompt_logprobs[-50:], atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("prompts", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_prefixes_make_room_for_what_is_needed(rig, prompts):
    sampler = rig.make_sampler(cache_bytes=TOKEN_BYTES * 64 * 9)
    for seed in range(prompts):
        result = output(sampler, prompt_of(300, seed), "v0", seed=seed)
        alone = output(rig.make_sampler(), prompt_of(300, seed), "v0", seed=seed)
        assert same(result.sequences[0], alone.sequences[0])
        assert sampler.pages_free == sampler.pages_total


@pytest.mark.full
def test_more_samples_than_rows_are_those_of_a_larger_batch(rig):
    sampler = rig.make_sampler(max_rows=4, max_context_length=256)
    few_rows = output(sampler, prompt_of(30), "v0", n=6, seed=3).sequences
    assert all(map(same, few_rows, output(rig.sampler, prompt_of(30), "v0", n=6, seed=3).sequences))


@pytest.mark.full
def test_long_requests_take_turns_when_memory_is_short(rig):
    sampler = rig.make_sampler(cache_bytes=TOKEN_BYTES * 64 * 18, max_context_length=512)  # 8 pages each
    requests = [request(prompt_of(300, seed), seed=seed, max_tokens=100) for seed in range(3)]
    for asked in requests:
        sampler.add(asked)
    results = finish(sampler)
    assert list(results) == [asked.request_id for asked in requests]
    (alone,) = run(rig.sampler, requests[1])
    assert same(results[requests[1].request_id].sequences[0], alone.sequences[0])


@pytest.mark.full
def test_a_small_request_passes_a_large_one_that_waits_for_memory(rig):
    sampler = rig.make_sampler(cache_bytes=TOKEN_BYTES * 64 * 9)  # 8 pages
    large = [request(prompt_of(10, seed), max_tokens=320) for seed in range(2)]  # 6 pages each
    small = request(prompt_of(11), max_tokens=6)
    for asked in (*large, small):
        sampler.add(asked)
    assert small.request_id in sampler.running
    results = finish(sampler)
    assert list(results) == [small.request_id, *(asked.request_id for asked in large)]
    assert same(results[small.request_id].sequences[0], sequence(rig.sampler, prompt_of(11), max_tokens=6))


@pytest.mark.full
@pytest.mark.parametrize("rows", [1, 4])
def test_small_requests_that_never_end_do_not_starve_a_large_one(rig, rows):
    """The large one takes all pages, and there is always a small one that has some."""
    sampler = rig.make_sampler(cache_bytes=TOKEN_BYTES * 64 * 9, max_rows=rows)
    sampler.add(request(prompt_of(12), max_tokens=20))
    sampler.burst()
    sampler.add(request(prompt_of(440), name="large", max_tokens=3))
    ended = []
    for seed in range(40):
        sampler.add(request(prompt_of(12, seed), max_tokens=12))
        ended += [done.request_id for done in sampler.burst()]
    assert "large" in ended
    finish(sampler)


@pytest.mark.full
def test_samples_that_lack_pages_do_not_hold_up_those_that_have_them(rig):
    """Of the first request's samples one fits at a time; the second begins between them, with what the next needs."""
    sampler = rig.make_sampler(cache_bytes=TOKEN_BYTES * 64 * 9)
    first, second = request(prompt_of(65), n=2, max_tokens=440), request(prompt_of(65, 1), max_tokens=6)
    sampler.add(first)
    sampler.add(second)
    ended = [done.request_id for _ in range(400) if sampler.busy for done in sampler.burst()]
    assert sorted(ended) == sorted([first.request_id, second.request_id])


def test_deterministic_samples_are_bitwise_the_same_when_one_passes_another(rig):
    sampler = rig.make_sampler(deterministic=True, max_rows=4, max_context_length=256, cache_bytes=TOKEN_BYTES * 64 * 6)
    large = [request(prompt_of(129, seed), "v0", max_tokens=40) for seed in range(2)]  # 3 of 5 pages each
    small = request(prompt_of(11), "v0", max_tokens=6)
    for asked in (*large, small):
        sampler.add(asked)
    together = finish(sampler)
    assert next(iter(together)) == small.request_id
    for asked in (*large, small):
        (alone,) = run(sampler, asked)
        assert same(alone.sequences[0], together[asked.request_id].sequences[0], atol=0)


def test_a_request_that_can_never_fit_is_refused_with_a_way_out(rig):
    sampler = rig.make_sampler(cache_bytes=TOKEN_BYTES * 64 * 6)
    with pytest.raises(RequestError, match=r"max_tokens=200 after a prompt of 100 .* at most 257; ask for fewer"):
        sampler.add(request(prompt_of(100), max_tokens=200))


def test_a_request_that_there_is_no_memory_to_begin_fails_alone(rig):
    """More alternatives than any machine can hold: the first request's tables are never made."""
    hopeless = request(prompt_of(20), "v0", alternatives=2**50)
    other = request(prompt_of(20), "v1")
    failed, result = run(rig.sampler, hopeless, other)
    assert isinstance(failed, ErrorResponse)
    assert same(result.sequences[0], sequence(rig.sampler, prompt_of(20), "v1"))
    assert rig.versions.pinned == 0
    assert rig.sampler.pages_free == rig.sampler.pages_total


@pytest.mark.parametrize("bursts", [0, 1, 3])
@pytest.mark.parametrize("length", [4, 900])
def test_a_cancelled_request_frees_everything_and_completes_nothing(rig, bursts, length):
    rig.sampler.add(request(prompt_of(length), "v0", name="cancelled", max_tokens=100, n=2))
    for _ in range(bursts):
        assert rig.sampler.burst() == []
    rig.sampler.cancel("cancelled")
    assert not rig.sampler.busy
    assert rig.versions.pinned == 0
    assert rig.sampler.pages_free == rig.sampler.pages_total


def test_a_lost_backend_is_no_error_of_requests(rig, monkeypatch):
    sampler, calls = rig.make_sampler(rig.pool()), []

    def lost(version: object, pieces: list[object]) -> None:
        calls.append(len(pieces))
        raise BackendLost("the worker has ended")

    monkeypatch.setattr(sampler._runner, "read", lost)
    for seed in range(2):
        sampler.add(request(prompt_of(5, seed), None))
    with pytest.raises(BackendLost, match="the worker has ended"):
        finish(sampler)
    assert len(calls) == 1, "prompts are not tried one by one"


def test_a_lost_cache_fails_running_requests_and_the_next_ones_are_fine(rig):
    waiting = request(prompt_of(20), "v0")
    (expected,) = run(rig.sampler, waiting)
    rig.sampler.add(request(prompt_of(5), "v1", name="running", max_tokens=50))
    rig.sampler.burst()
    rig.sampler._runner._pool[0][0].delete()  # what a failed program leaves of a cache that was donated to it
    rig.sampler.add(waiting)
    results = finish(rig.sampler)
    assert isinstance(results["running"], ErrorResponse)
    assert results["running"].status == "server"
    (again,) = run(rig.sampler, waiting)
    assert same(again.sequences[0], expected.sequences[0])


@pytest.mark.full
def test_a_cache_that_a_failed_program_has_poisoned_is_made_again(rig):
    command = [sys.executable, "tests/backends/poisoned_cache.py", str(rig.folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([".", "tests", "tests/backends", *sys.path])}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.full
def test_a_cache_that_is_lost_while_a_prompt_is_copied_has_all_its_pages_again(rig):
    sampler = rig.make_sampler(max_rows=1)
    sampler.add(request(prompt_of(20), "v0", max_tokens=1, n=2))
    assert sampler.burst() == []  # of two samples, one
    sampler._runner._pool[0][0].delete()
    (failed,) = finish(sampler).values()
    assert isinstance(failed, ErrorResponse)
    assert sampler.pages_free == sampler.pages_total


def test_a_lost_bank_is_made_again_of_the_published_versions(rig):
    asked = request(prompt_of(20), "v0")
    (expected,) = run(rig.sampler, asked)
    rig.sampler.add(request(prompt_of(5), "v1", name="running", max_tokens=50))
    rig.sampler.burst()
    jax.tree.leaves(rig.sampler._runner._banks._banks[1][0].adapters)[0].delete()
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


@pytest.mark.full
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
    assert rig.sampler.pages_free == rig.sampler.pages_total
