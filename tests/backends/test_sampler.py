"""Samples against Hugging Face and the trainer's forward pass, whatever their seed and limits."""

from collections import deque

import jax
import numpy as np
import pytest
import torch
from sampling_rig import Rig, output, prompt_of, request, run, same, sequence

import oracle
from skyrl.types import SamplingOptions, TokenMatrix

pytestmark = pytest.mark.gpu

SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
]


@pytest.fixture(scope="module")
def rig(tiny_model) -> Rig:
    return Rig.of(tiny_model)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(rig):
    yield
    assert not rig.sampler.busy
    assert rig.versions.pinned == 0


@pytest.fixture(scope="module")
def reference(tiny_model):
    return oracle.load(tiny_model)


@pytest.mark.parametrize("length", [1, 2, 33, 200, 300])
def test_greedy_equals_generate_up_to_the_first_near_tie(rig, reference, length):
    prompt = prompt_of(length)
    generated = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, length, dtype=torch.long),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    expected = generated.sequences[0, length:].numpy()
    best = torch.stack(generated.logits)[:, 0].topk(2).values
    ties = np.flatnonzero((best[:, 0] - best[:, 1]).numpy() < 1e-4)
    count = int(ties[0]) if len(ties) else len(expected)
    assert count > 5
    tokens = sequence(rig.sampler, prompt, temperature=0.0, max_tokens=24).tokens
    np.testing.assert_array_equal(tokens[:count], expected[:count])


@pytest.mark.parametrize(("version", "settings"), [*zip([None, "v0", "v1", "v1"], SETTINGS, strict=True)])
def test_logprobs_equal_those_of_the_trainers_forward_pass(rig, version, settings):
    prompt = prompt_of(40)
    sampled = sequence(rig.sampler, prompt, version, max_tokens=30, seed=3, **settings)
    adapter = rig.adapter(int(version[1])) if version else None
    full = rig.full_logprobs([*prompt, *sampled.tokens.tolist()], adapter)
    expected = full[np.arange(39, 69), sampled.tokens]
    np.testing.assert_allclose(sampled.logprobs, expected, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("length", [50, pytest.param(250, marks=pytest.mark.slow)])
def test_thousands_of_random_tokens_have_the_trainers_logprobs_at_any_temperature(rig, length):
    """Beside each other, over three adapters and the base, long and short; at 0.7 in the trainer's mode."""
    versions, lengths = [None, "v0", "v1", "v2"], [1, 30, 200, 600]
    asked = [
        request(
            prompt_of(lengths[i // 4 % 4], i),
            versions[i % 4],
            seed=i,
            max_tokens=length,
            temperature=[1.0, 0.7][i % 8 // 4],
            tempered=True,
        )
        for i in range(40)
    ]
    worst = 0.0
    for each, result in zip(asked, run(rig.sampler, *asked), strict=True):
        (sampled,) = result.sequences
        adapter = rig.adapter(int(each.version[1])) if each.version else None
        first = len(each.prompt) - 1
        logits = rig.full_logprobs([*each.prompt.tolist(), *sampled.tokens.tolist()], adapter)[first:-1]
        expected = jax.nn.log_softmax(logits / np.float32(each.params.temperature), axis=-1)
        found = np.take_along_axis(np.asarray(expected), sampled.tokens[:, None], axis=-1)[:, 0]
        assert len(sampled.tokens) == length
        worst = max(worst, float(np.abs(found - sampled.logprobs).max()))
    assert worst <= 1e-4


def test_logprobs_of_the_base_model_equal_hugging_faces(rig, reference):
    prompt = prompt_of(20)
    sampled = sequence(rig.sampler, prompt, max_tokens=30, temperature=0.7)
    expected = oracle.logprobs(reference, [*prompt, *sampled.tokens.tolist()]).detach().numpy()[19:]
    np.testing.assert_allclose(sampled.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**63 - 1, -(2**63)])
def test_any_int64_seed_is_reproducible(rig, seed):
    first = sequence(rig.sampler, prompt_of(5), "v0", seed=seed)
    assert same(first, sequence(rig.sampler, prompt_of(5), "v0", seed=seed), atol=0)


def test_seeds_give_different_samples(rig):
    seeds = [0, 1, -1, 2**31, 2**31 - 1, 2**32, 2**63 - 1]
    results = run(rig.sampler, *(request(prompt_of(5), seed=seed) for seed in seeds))
    assert len({tuple(result.sequences[0].tokens) for result in results}) == len(seeds)


@pytest.mark.parametrize("limits", [{"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-6}])
def test_narrow_limits_are_greedy(rig, limits):
    greedy = sequence(rig.sampler, prompt_of(9), "v2", temperature=0.0)
    assert same(greedy, sequence(rig.sampler, prompt_of(9), "v2", **limits))


@pytest.mark.parametrize("limits", [{"temperature": 1e30 * 1e30}, {"top_k": 10**15}, {"top_p": 1e-60}])
def test_extreme_limits_are_served(rig, limits):
    sampled = sequence(rig.sampler, prompt_of(9), **limits)
    assert np.isfinite(sampled.logprobs).all()


@pytest.mark.parametrize("length", [1, 2, 33, 200, 300])
def test_prompt_logprobs_equal_hugging_faces_and_begin_with_nan(rig, reference, length):
    prompt = prompt_of(length)
    logprobs = output(rig.sampler, prompt, scores=True, max_tokens=1).prompt_logprobs
    assert logprobs.shape == (length,)
    assert logprobs.dtype == np.float32
    assert np.isnan(logprobs[0])
    if length > 1:
        expected = oracle.logprobs(reference, prompt).detach().numpy()
        np.testing.assert_allclose(logprobs[1:], expected, atol=1e-4)


@pytest.mark.parametrize("k", [1, 3])
def test_topk_prompt_logprobs_are_the_most_likely_tokens(rig, k):
    prompt = prompt_of(45)
    result = output(rig.sampler, prompt, "v0", topk=k, max_tokens=1)
    ids, logprobs = result.topk_prompt_logprobs
    assert result.prompt_logprobs is None
    assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
    assert ids[0].tolist() == [0] * k
    assert logprobs[0].tolist() == [-99999.0] * k
    full = rig.full_logprobs(prompt, rig.adapter(0))[:-1]
    np.testing.assert_allclose(logprobs[1:], -np.sort(-full, axis=-1)[:, :k], atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(full, ids[1:], axis=-1), logprobs[1:], atol=1e-4)


def any_request(draws: np.random.Generator):
    """One over the whole accepted domain."""
    length = int(draws.choice([1, 2, 20, 33, 70, 140, 250]))
    max_tokens = min(int(draws.choice([1, 3, 9, 60], p=[0.4, 0.3, 0.28, 0.02])), 256 - length)
    return request(
        prompt_of(length, int(draws.integers(0, 10))),
        draws.choice([None, "v0", "v1", "v2"]),
        n=int(draws.choice([1] * 16 + [2, 3, 5, 40])),
        max_tokens=max_tokens,
        seed=int(draws.integers(-(2**63), 2**63)),
        temperature=float(draws.choice([0.0, 1e-9, 0.7, 1.0, 100.0])),
        top_k=int(draws.choice([-1, 0, 1, 7, 10**9])),
        top_p=float(draws.choice([1.0, 0.9, 1e-6])),
        stop=[None, [], [5, 6, 7], list(range(40)), "x", ["ab", "\u00e9"]][draws.integers(0, 6)],
        scores=bool(draws.random() < 0.1),
        topk=int(draws.choice([0] * 8 + [1, 20, 64])),
        sample_topk=int(draws.choice([0] * 8 + [1, 20, 64])),
        targets=_targets(draws, length) if draws.random() < 0.1 else None,
        alternatives=int(draws.choice([0] * 12 + [1, 9, 64])),
        last_n=None,
        tenant=str(draws.integers(0, 3)),
        tempered=bool(draws.random() < 0.3),
        options=SamplingOptions(min_p=float(draws.choice([0, 0, 0, 0.2]))),
    )


def _targets(draws: np.random.Generator, length: int) -> TokenMatrix | None:
    shape = length - 1, int(draws.choice([1, 3, 70, 600]))
    return TokenMatrix(draws.integers(-1, 1500, shape[0] * shape[1]).astype(np.int32), shape) if length > 1 else None


@pytest.mark.full
@pytest.mark.parametrize("requests", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_after_the_warm_up_requests_over_the_whole_domain_compile_nothing(rig, requests):
    sampler = rig.make_sampler(max_context_length=256)
    deque(sampler.warm_up(), maxlen=0)
    programs = sampler._runner.compiled
    assert programs <= 40
    draws = np.random.default_rng(0)
    for _ in range(requests // 10):
        run(sampler, *(any_request(draws) for _ in range(10)))
    assert sampler._runner.compiled == programs


@pytest.mark.full
@pytest.mark.parametrize("version", [None, "v0"])
def test_a_first_sample_compiles_nothing_once_the_warm_up_says_so(rig, version):
    sampler = rig.make_sampler(max_context_length=256)
    next(ready for ready in sampler.warm_up() if ready)
    programs = sampler._runner.compiled
    sequence(sampler, prompt_of(20), version)
    assert sampler._runner.compiled == programs


@pytest.mark.full
def test_the_warm_up_leaves_requests_as_they_are(rig):
    sampler = rig.make_sampler(max_context_length=256)
    warm_up, sampled = sampler.warm_up(), []
    for seed in range(12):
        next(warm_up, None)
        sampled.append(sequence(sampler, prompt_of(70), "v0", seed=seed % 3))
    assert all(same(one, sampled[seed % 3]) for seed, one in enumerate(sampled))


@pytest.mark.full
def test_a_warm_up_that_fails_harms_no_request(rig):
    sampler = rig.make_sampler(max_context_length=256)
    warm_up = sampler.warm_up()
    next(warm_up)
    jax.tree.leaves(sampler._runner._pool)[0].delete()
    assert list(warm_up) == []
    assert same(sequence(sampler, prompt_of(70), "v0"), sequence(rig.sampler, prompt_of(70), "v0"))
