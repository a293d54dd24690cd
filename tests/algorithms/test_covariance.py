"""The tokens that clip_cov and kl_cov choose, against a plain NumPy selection."""

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.covariance import clip_cov_tokens, kl_cov_tokens

SHAPE = (5, 8)
MASK = np.random.default_rng(1).random(SHAPE) < 0.8
SETTINGS = {"clip_ratio": 0.1, "clip_cov_lb": 0.2, "clip_cov_ub": 2.0}


def example(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(log-probabilities, old ones, advantages), NaN outside the mask."""
    rng = np.random.default_rng(seed)
    logprobs = np.where(MASK, -rng.exponential(size=SHAPE), np.nan)
    return logprobs, logprobs + rng.normal(scale=0.2, size=SHAPE), np.where(MASK, rng.normal(size=SHAPE), np.nan)


def covariances(logprobs, advantages, mask) -> np.ndarray:
    a, lp = advantages[mask], logprobs[mask]
    result = np.full(mask.shape, np.nan)
    result[mask] = (a - a.mean()) * (lp - lp.mean())
    return result


def candidates(logprobs, old, advantages, low: float, high: float) -> np.ndarray:
    covariance, ratio = covariances(logprobs, advantages, MASK), np.exp(logprobs - old)
    clipped = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
    return (covariance > low) & (covariance < high) & ~clipped


def clip(logprobs, old, advantages, mask=MASK, seed: int = 0, **options):
    return clip_cov_tokens(logprobs, old, advantages, mask, np.random.default_rng(seed), **{**SETTINGS, **options})


def test_clip_cov_takes_all_candidates_if_the_fraction_allows_it():
    expected = candidates(*example(), 0.2, 2.0)
    assert 0 < expected.sum() < MASK.sum()
    np.testing.assert_array_equal(clip(*example(), clip_ratio=1.0), expected)


@settings(max_examples=30, deadline=None)
@given(fraction=st.floats(0, 0.2), seed=st.integers(0, 99))
def test_clip_cov_takes_the_fraction_of_all_tokens_and_at_least_one_among_the_candidates(fraction, seed):
    allowed = candidates(*example(seed), 0.2, 2.0)
    chosen = clip(*example(seed), clip_ratio=fraction, seed=seed) == 1
    assert chosen.sum() == min(max(int(fraction * MASK.sum()), 1), allowed.sum())
    assert not (chosen & ~allowed).any()


def test_clip_cov_draws_every_candidate_sometimes():
    drawn = sum(np.asarray(clip(*example(), seed=seed)) for seed in range(60))
    np.testing.assert_array_equal(drawn > 0, candidates(*example(), 0.2, 2.0))


def test_clip_cov_draws_the_same_tokens_from_the_same_seed():
    np.testing.assert_array_equal(clip(*example(), seed=4), clip(*example(), seed=4))


def test_clip_cov_engages_at_its_default_bounds_on_unscaled_advantages():
    """Covariances of one and more are there as long as no reduction has divided the advantages."""
    logprobs, advantages = np.array([[-3.0, -0.1, -0.1, -3.0]]), np.array([[-1.0, 1.0, 1.0, -1.0]])
    generator = np.random.default_rng(0)
    chosen = clip_cov_tokens(logprobs, logprobs, advantages, np.ones((1, 4)), generator, clip_ratio=1.0)
    assert chosen.all()


@pytest.mark.parametrize("fraction", [0.0, 0.2, 1.0])
def test_kl_cov_takes_the_tokens_of_the_highest_covariance_and_at_least_one(fraction):
    logprobs, _, advantages = example()
    covariance = covariances(logprobs, advantages, MASK)
    wanted = max(int(fraction * MASK.sum()), 1)
    expected = covariance >= np.sort(covariance[MASK])[-wanted]
    np.testing.assert_array_equal(kl_cov_tokens(logprobs, advantages, MASK, kl_cov_frac=fraction), expected)


def choose(name: str, logprobs, old, advantages, mask=MASK):
    if name == "kl_cov":
        return kl_cov_tokens(logprobs, advantages, mask)
    return clip(logprobs, old, advantages, mask)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(SHAPE[0])), left=st.integers(0, 2), right=st.integers(0, 2), seed=st.integers(0, 99))
def test_padding_and_order_change_no_choice(name, order, left, right, seed):
    pad = ((0, 1), (left, right))
    wide = [np.pad(values[order], pad, constant_values=np.nan) for values in example(seed)]
    result = choose(name, *wide, np.pad(MASK[order], pad))
    np.testing.assert_array_equal(result[:-1, left : left + SHAPE[1]], choose(name, *example(seed))[order])
    assert result.sum() == choose(name, *example(seed)).sum()


@pytest.mark.parametrize("asarray", [jax.numpy.asarray, torch.as_tensor])
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_marks_come_in_the_library_and_type_of_the_logprobs(name, asarray):
    result = choose(name, *(asarray(values.astype(np.float32)) for values in example()), asarray(MASK))
    assert type(result) is type(asarray(np.zeros(1)))
    assert np.asarray(result).dtype == np.float32
    np.testing.assert_array_equal(np.asarray(result), choose(name, *example()))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_without_tokens_nothing_is_chosen(name):
    assert not choose(name, *example(), np.zeros(SHAPE)).any()
