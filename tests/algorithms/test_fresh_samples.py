"""Fresh samples: learner and sampler are one policy, and what tells their log-probabilities apart is rounding noise.

Every cut into micro-batches has other noise. No gradient and no choice of tokens may follow from its sign.
"""

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from skyrl.algorithms.covariance import clip_cov_tokens, kl_cov_tokens
from skyrl.algorithms.kl import KL_ESTIMATORS
from skyrl.algorithms.losses import LossInputs
from skyrl.algorithms.objective import policy_objective
from skyrl.algorithms.policy_losses import PolicyLossRegistry

SHAPE = (2, 6)
NOISE = 3e-6
"""Nats by which passes over other micro-batches differ in float32."""
CLIPS = [{}, {"eps_clip_low": 0.0, "eps_clip_high": 0.0}]
LOSSES = [name for name in sorted(PolicyLossRegistry) if ":" not in name]

rng = np.random.default_rng(0)
OLD = -rng.exponential(size=SHAPE)
ADVANTAGES = rng.normal(size=SHAPE)

noises = arrays.arrays(np.float64, SHAPE, elements=st.sampled_from([-NOISE, -1e-7, 0.0, 1e-7, NOISE]))


def inputs(logprobs, asarray) -> LossInputs:
    ones = asarray(np.ones(SHAPE))
    old = asarray(OLD)
    return LossInputs(
        logprobs=logprobs,
        weights=ones,
        sampling_logprobs=old,
        advantages=asarray(ADVANTAGES),
        sequence_ratio_mask=ones,
        selected=asarray((np.arange(12).reshape(SHAPE) % 2).astype(float)),
        reference_logprobs=old,
        segments=asarray(np.zeros(SHAPE, np.int32)),
    )


def torch_gradient(options, logprobs: np.ndarray) -> np.ndarray:
    leaf = torch.tensor(logprobs, requires_grad=True)
    policy_objective(options)(inputs(leaf, torch.as_tensor)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad.numpy()


def jax_gradient(options, logprobs: np.ndarray) -> np.ndarray:
    objective = policy_objective(options)
    cast = jax.numpy.asarray
    return np.asarray(jax.grad(lambda lp: objective(inputs(lp, cast)).sum())(cast(logprobs)))


def options_of(loss: str, **options) -> dict:
    kl = {"use_kl_loss": False, "kl_estimator_type": "k3", "kl_loss_coef": 1.0}
    return {"policy_loss_type": loss, **kl, "use_entropy_loss": False, **options}


@pytest.mark.parametrize("clips", CLIPS, ids=["default clips", "clips at 0"])
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=20, deadline=None)
@given(noise=noises)
def test_the_gradient_of_a_policy_loss_is_that_without_noise(loss, clips, noise):
    options = options_of(loss, **clips)
    expected = torch_gradient(options, OLD)
    np.testing.assert_allclose(torch_gradient(options, OLD + noise), expected, atol=10 * NOISE)


@pytest.mark.parametrize("estimator", sorted(KL_ESTIMATORS))
@settings(max_examples=20, deadline=None)
@given(noise=noises)
def test_the_gradient_of_a_kl_estimator_is_that_without_noise(estimator, noise):
    options = options_of("importance_sampling", use_kl_loss=True, kl_estimator_type=estimator)
    expected = torch_gradient(options, OLD)
    np.testing.assert_allclose(torch_gradient(options, OLD + noise), expected, atol=10 * NOISE)


@pytest.mark.parametrize("loss", ["kl_cov", "regular"])
def test_jax_has_the_gradients_of_torch_on_fresh_samples(loss):
    noise = NOISE * np.sign(rng.normal(size=SHAPE))
    options = options_of(loss, **CLIPS[1])
    np.testing.assert_allclose(jax_gradient(options, OLD + noise), torch_gradient(options, OLD), atol=10 * NOISE)


coarse = arrays.arrays(np.float64, SHAPE, elements=st.sampled_from([-0.5, -1.0, -2.0, -3.0]))
groups = arrays.arrays(np.float64, SHAPE, elements=st.sampled_from([-1.0, 0.5, 2.0]))


@settings(max_examples=60, deadline=None)
@given(logprobs=coarse, advantages=groups, noise=noises, fraction=st.sampled_from([0.0, 0.2, 0.5]))
def test_kl_cov_chooses_the_same_tokens_whatever_the_noise_among_equal_ones(logprobs, advantages, noise, fraction):
    def chosen(values: np.ndarray) -> np.ndarray:
        return np.asarray(kl_cov_tokens(values, advantages, np.ones(SHAPE), kl_cov_frac=fraction))

    np.testing.assert_array_equal(chosen(logprobs + noise), chosen(logprobs))


@settings(max_examples=60, deadline=None)
@given(logprobs=coarse, advantages=groups, noise=noises)
def test_clip_cov_draws_the_same_tokens_whatever_the_noise_among_equal_ones(logprobs, advantages, noise):
    bounds = {
        "clip_ratio": 0.2,
        "clip_cov_lb": 0.0123,
        "clip_cov_ub": 5.0123,
        "eps_clip_low": 0.0,
        "eps_clip_high": 0.0,
    }

    def chosen(values: np.ndarray) -> np.ndarray:
        generator = np.random.default_rng(0)
        return np.asarray(clip_cov_tokens(values, logprobs, advantages, np.ones(SHAPE), generator, **bounds))

    np.testing.assert_array_equal(chosen(logprobs + noise), chosen(logprobs))
