"""KL estimators, the penalty on rewards and the controllers against plain NumPy and torch's distributions."""

import array_api_strict
import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    kl_controller,
    mean_kl,
    penalise_rewards,
)

LIBRARIES = [np.asarray, jax.numpy.asarray, torch.as_tensor, array_api_strict.asarray]
NAMES = ["abs", "k1", "k2", "k3"]
FORMULAS = {
    "k1": lambda lp, ref: lp - ref,
    "abs": lambda lp, ref: abs(lp - ref),
    "k2": lambda lp, ref: 0.5 * (lp - ref) ** 2,
    "k3": lambda lp, ref: np.exp(ref - lp) - (ref - lp) - 1,
}


def example(dtype=np.float64) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return (-rng.exponential(size=(3, 5))).astype(dtype), (-rng.exponential(size=(3, 5))).astype(dtype)


def gradient(name: str, logprobs, reference) -> np.ndarray:
    logprobs = torch.tensor(logprobs, requires_grad=True)
    KL_ESTIMATORS[name](logprobs, torch.tensor(reference)).sum().backward()
    return logprobs.grad.numpy()


@pytest.mark.parametrize("asarray", LIBRARIES)
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_formula(name, asarray):
    logprobs, reference = (asarray(values) for values in example(np.float32))
    expected = FORMULAS[name](*example())
    np.testing.assert_allclose(np.asarray(KL_ESTIMATORS[name](logprobs, reference)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_finite_differences(name):
    (logprobs, reference), step = example(), 1e-6
    above, below = (KL_ESTIMATORS[name](logprobs + sign * step, reference) for sign in (1, -1))
    np.testing.assert_allclose(gradient(name, logprobs, reference), (above - below) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_float32_gradients_of_jax_and_torch_are_those_of_float64(name):
    logprobs, reference = example(np.float32)
    expected = gradient(name, *example())
    result = jax.jit(jax.grad(lambda lp: KL_ESTIMATORS[name](lp, reference).sum()))(logprobs)
    np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient(name, logprobs, reference), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_an_identical_reference_has_no_divergence_at_all(name):
    logprobs, _ = example(np.float32)
    assert not KL_ESTIMATORS[name](logprobs, logprobs).any()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_mean_over_samples_is_the_divergence(name):
    """Exactly: the mean over all tokens of the vocabulary, each with its probability."""
    policy, reference = (torch.distributions.Categorical(logits=torch.tensor(values[0])) for values in example())
    estimates = KL_ESTIMATORS[name](policy.logits.numpy()[None], reference.logits.numpy()[None])[0]
    expected = torch.distributions.kl_divergence(policy, reference).item()
    assert (policy.probs.numpy() * estimates).sum() == pytest.approx(expected)


def test_the_mean_gradient_of_k2_is_that_of_the_divergence():
    """As a loss: samples are drawn with the policy's probabilities, which the gradient does not see."""
    logits, reference = (torch.tensor(values[0]) for values in example())
    logits.requires_grad_()
    policy = torch.distributions.Categorical(logits=logits)
    estimates = KL_ESTIMATORS["k2"](policy.logits[None], torch.log_softmax(reference, 0)[None])[0]
    (estimated,) = torch.autograd.grad((policy.probs.detach() * estimates).sum(), logits, retain_graph=True)
    divergence = torch.distributions.kl_divergence(policy, torch.distributions.Categorical(logits=reference))
    (exact,) = torch.autograd.grad(divergence, logits)
    np.testing.assert_allclose(estimated.numpy(), exact.numpy(), atol=1e-12)


@pytest.mark.parametrize("distance", [2.5, 10.0, 30.0, 1000.0])
def test_k3_keeps_its_gradient_where_the_divergence_is_large(distance):
    slope = gradient("k3", np.array([[-distance]]), np.array([[0.0]])).item()
    assert slope == pytest.approx(1 - np.exp(min(distance, 20)))


def test_k3_is_precise_near_zero():
    difference = np.array([[1e-4, -3e-4, 2e-3]], np.float32)
    result = KL_ESTIMATORS["k3"](-difference, np.zeros_like(difference))
    np.testing.assert_allclose(result, np.expm1(difference.astype(float)) - difference, rtol=1e-2)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(pair=st.tuples(*[st.floats(-1e9, 1e9, width=32)] * 2))
def test_every_estimate_and_its_gradient_are_finite(name, pair):
    logprobs, reference = (np.array([[value]], np.float32) for value in pair)
    assert np.isfinite(KL_ESTIMATORS[name](logprobs, reference)).all()
    assert np.isfinite(gradient(name, logprobs, reference)).all()


def test_an_unknown_estimator_lists_the_known_ones():
    with pytest.raises(KeyError, match="no KL estimator named 'k4'; known: abs, k1, k2, k3"):
        KL_ESTIMATORS["k4"]


@pytest.mark.parametrize("asarray", LIBRARIES)
def test_rewards_lose_the_divergence_of_counted_tokens_and_of_no_others(asarray):
    rewards, kl = np.array([[0.0, 1.0, 0.0]]), np.array([[0.5, 2.0, np.nan]])
    result = penalise_rewards(asarray(rewards), asarray(kl), asarray(np.array([[1.0, 1.0, 0.0]])), 0.1)
    np.testing.assert_allclose(np.asarray(result), [[-0.05, 0.8, 0.0]], rtol=1e-6)


@pytest.mark.parametrize("asarray", LIBRARIES)
def test_the_mean_divergence_is_over_sequences_of_the_mean_over_their_tokens(asarray):
    kl = np.array([[1.0, 3.0, np.nan], [8.0, np.nan, np.nan], [np.nan] * 3])
    mask = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert mean_kl(asarray(kl), asarray(mask)) == pytest.approx((2.0 + 8.0) / 2)


def test_the_mean_divergence_of_nothing_is_zero():
    assert mean_kl(np.ones((2, 3)), np.zeros((2, 3))) == 0.0


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.1, 1.0), (0.11, 1 + 0.1 * 50 / 1000), (9.0, 1 + 0.2 * 50 / 1000), (0.0, 1 - 0.2 * 50 / 1000)],
)
def test_the_adaptive_coefficient_follows_the_clipped_relative_error(kl, factor):
    controller = AdaptiveKLController(0.5, target=0.1, horizon=1000)
    controller.update(kl, sequences=50)
    assert controller.value == pytest.approx(0.5 * factor)


def test_the_controller_is_chosen_by_its_type():
    assert kl_controller("fixed", 0.1, kl_target=1.0, horizon=2) == FixedKLController(0.1)
    assert kl_controller("adaptive", 0.1, kl_target=1.0, horizon=2) == AdaptiveKLController(0.1, 1.0, 2)
    with pytest.raises(ValueError, match=r"kl_ctrl\.type='other' is unknown; use fixed or adaptive"):
        kl_controller("other", 0.1, kl_target=1.0, horizon=2)


@pytest.mark.parametrize(("target", "horizon", "field"), [(0.0, 10, "kl_target=0.0"), (0.1, 0, "horizon=0")])
def test_an_adaptive_controller_refuses_to_divide_by_zero(target, horizon, field):
    with pytest.raises(ValueError, match=rf"kl_ctrl\.{field} must be positive"):
        AdaptiveKLController(0.5, target=target, horizon=horizon)


def test_a_horizon_that_could_turn_the_coefficient_negative_is_refused():
    with pytest.raises(ValueError, match=r"horizon=10 is too short for batches of 50 sequences.*more than 10"):
        AdaptiveKLController(0.5, target=0.1, horizon=10).update(0.0, sequences=50)
