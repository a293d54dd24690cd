"""Random workloads: each request gets what it gets alone, up to the first place where rounding may decide."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_rig import Rig, finish, prompt_of, request, run

from skyrl.backends.common.sampling.random_numbers import seed_words
from skyrl.backends.operations import Sample
from skyrl.tx.sampling import uniforms
from skyrl.types import GeneratedSequence, SampleOutput

CLOSE = 1e-4
"""Gap of the two best tokens, or distance of the random number to the end of a token's share: rounding may cross it."""
_tenants = itertools.count()


@pytest.fixture(scope="module")
def rig(tiny_model) -> Rig:
    return Rig.of(tiny_model)


@pytest.fixture(scope="module")
def apart(rig):
    return rig.make_sampler(max_rows=4)


@pytest.fixture(scope="module")
def deterministic(rig):
    return rig.make_sampler(deterministic=True, max_rows=4, max_context_length=256)


def prompts() -> st.SearchStrategy[list[int]]:
    """A few that begin alike, so that prefixes of every length are shared, also while they are read."""
    return st.builds(
        lambda family, length, own: prompt_of(150, family)[:length] + prompt_of(own, 9),
        st.integers(0, 1),
        st.integers(1, 150),
        st.integers(0, 20),
    )


samples = st.builds(
    request,
    prompts(),
    st.sampled_from([None, "v0", "v1", "v2"]),
    n=st.integers(1, 5),
    max_tokens=st.integers(1, 24),
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([-1, -1, 1, 5, 50]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    stop=st.sampled_from([[], None, list(range(0, 1500, 15)), [" a", "e"]]),
    scores=st.booleans(),
    tenant=st.sampled_from(["one", "two"]),
)
workloads = st.lists(st.one_of(samples, st.just("burst"), st.integers(0, 9)), min_size=2, max_size=16)
"""Requests that arrive, bursts in between, and cancellations by number."""


def work_through(sampler, workload) -> tuple[list[Sample], dict]:
    """Carry out a workload. Return the samples that were not cancelled, and the results."""
    asked: list[Sample] = []
    results = {}
    for number, action in enumerate(workload):
        if action == "burst":
            results |= {done.request_id: done.result for done in sampler.burst()}
        elif isinstance(action, Sample):
            asked.append(dataclasses.replace(action, request_id=str(number)))
            sampler.add(asked[-1])
        elif asked and (other := asked[action % len(asked)]).request_id not in results:
            sampler.cancel(other.request_id)
            asked.remove(other)
    return asked, results | finish(sampler)


def rounding_may_decide(rig: Rig, asked: Sample, alone: GeneratedSequence, index: int, step: int) -> bool:
    """Return True if the token of `alone` at `step` is ahead by less than `CLOSE`; in NumPy float64."""
    adapter = rig.adapter(int(asked.version[1])) if asked.version else None
    logprobs = rig.full_logprobs([*asked.prompt.tolist(), *alone.tokens[:step].tolist()], adapter)[-1]
    params, order = asked.params, np.argsort(-logprobs, kind="stable")
    best = logprobs[order].astype(np.float64)
    if params.temperature == 0:
        return best[0] - best[1] < CLOSE
    weights = np.exp((best - best[0]) / params.temperature)
    if params.top_k > 0:
        if params.top_k < len(best) and best[params.top_k - 1] - best[params.top_k] < CLOSE:
            return True
        weights[params.top_k :] = 0
    if params.top_p < 1:
        reached = np.cumsum(weights) / weights.sum()
        if abs(reached - params.top_p).min() < CLOSE:
            return True
        weights[np.searchsorted(reached, params.top_p) + 1 :] = 0
    shares = np.zeros_like(weights)
    shares[order] = weights / weights.sum()
    ends = np.cumsum(shares)
    token = alone.tokens[step]
    seeds = np.asarray([seed_words(asked.params.seed)], np.uint32)
    number = float(uniforms(seeds, np.asarray([index], np.int32), np.asarray([step], np.int32))[0])
    assert ends[token] - shares[token] - CLOSE < number < ends[token] + CLOSE
    return min(abs(number - ends[token]), abs(number - ends[token] + shares[token])) < CLOSE


def check_same(rig: Rig, asked: Sample, alone: SampleOutput, beside: SampleOutput) -> None:
    for index, (one, other) in enumerate(zip(alone.sequences, beside.sequences, strict=True)):
        common = min(len(one.tokens), len(other.tokens))
        differs = np.flatnonzero(one.tokens[:common] != other.tokens[:common])
        step = int(differs[0]) if len(differs) else common
        np.testing.assert_allclose(one.logprobs[:step], other.logprobs[:step], rtol=0, atol=CLOSE)
        if len(differs):
            assert rounding_may_decide(rig, asked, one, index, step), (asked, index, step)
        else:
            assert (len(one.tokens), one.stop_reason) == (len(other.tokens), other.stop_reason)
    if alone.prompt_logprobs is not None:
        np.testing.assert_allclose(alone.prompt_logprobs, beside.prompt_logprobs, rtol=0, atol=CLOSE)


def alone(sampler, asked: Sample) -> SampleOutput:
    """For a tenant of its own, so that no prefix is shared."""
    (result,) = run(sampler, dataclasses.replace(asked, request_id="alone", tenant=f"nobody else {next(_tenants)}"))
    assert isinstance(result, SampleOutput), result
    assert result.prompt_cache_hit_tokens == 0
    return result


@pytest.mark.full
@pytest.mark.parametrize("examples", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_each_request_gets_what_it_gets_alone(rig, apart, examples):
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(workload=workloads)
    def check(workload) -> None:
        asked, results = work_through(rig.sampler, workload)
        for each in asked:
            check_same(rig, each, alone(apart, each), results[each.request_id])

    check()


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@given(workload=workloads)
def test_each_request_gets_bit_for_bit_what_it_gets_alone_where_that_is_asked_for(deterministic, workload):
    asked, results = work_through(deterministic, workload)
    for each in asked:
        for one, other in zip(alone(deterministic, each).sequences, results[each.request_id].sequences, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
            assert one.stop_reason == other.stop_reason
