"""KL divergence of the policy from a reference: per-token estimators, the reward penalty, coefficient controllers.

An estimator maps two log-probabilities of the same sampled token to one value per token. It is differentiable in the
policy's log-probability. In a KL loss, each token's value has the same weight as its term of the policy loss.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from array_api_compat import array_namespace

from skyrl.algorithms.arrays import Mask, Tokens, count, magnitude, select
from skyrl.algorithms.losses import LARGEST, MAX_LOG_RATIO
from skyrl.utils.registry import Registry

KLEstimator = Callable[[Tokens, Tokens], Tokens]

KL_ESTIMATORS: Registry[KLEstimator] = Registry("KL estimator")


@KL_ESTIMATORS.register("k1")
def k1(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """Return the log-ratio, an unbiased estimate that may be negative. As a loss, its expected gradient is 0."""
    return _difference(logprobs, reference_logprobs)


@KL_ESTIMATORS.register("abs")
def absolute(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """Return the absolute log-ratio; 0 if it is rounding noise (`arrays.magnitude`)."""
    return magnitude(_difference(logprobs, reference_logprobs))


@KL_ESTIMATORS.register("k2")
def k2(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """Return half the squared log-ratio. As a loss, its expected gradient is that of the reverse KL divergence."""
    difference = _difference(logprobs, reference_logprobs)
    return 0.5 * difference * difference


@KL_ESTIMATORS.register("k3")
def k3(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """Return exp(d) - 1 - d with d = reference minus policy: unbiased and never negative.

    Above d = 20, the exponential is continued by its tangent. All values are thus finite, and the gradient does not
    vanish where the divergence is largest.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    xp = array_namespace(logprobs)
    difference = _difference(reference_logprobs, logprobs)
    large = difference > MAX_LOG_RATIO
    inside = xp.where(large, MAX_LOG_RATIO, difference)
    # Selected, not computed as difference - inside: gradients of e^20 would cancel, with a loss of precision.
    beyond = xp.where(large, difference - MAX_LOG_RATIO, 0.0)
    return xp.expm1(inside) + math.exp(MAX_LOG_RATIO) * beyond - difference


def penalise_rewards(rewards: Tokens, kl: Tokens, mask: Mask, coefficient: float) -> Tokens:
    """Return rewards minus `coefficient` times the KL of each token of the mask (`use_kl_in_reward`).

    `coefficient` is the `value` of a controller. All arrays are `[batch, tokens]`.
    """
    return rewards - coefficient * select(mask, kl)


def mean_kl(kl: Tokens, mask: Mask) -> float:
    """Return the mean KL per token of each sequence, averaged over the sequences. The controllers use it.

    Rows without unmasked tokens are ignored. 0 for a batch without such tokens.
    """
    xp = array_namespace(kl)
    counts = count(mask, kl)
    live = counts > 0
    means = xp.sum(select(mask, kl), axis=1) / xp.where(live, counts, 1.0)
    return float(xp.sum(means)) / max(int(xp.sum(xp.astype(live, xp.int32))), 1)


@dataclass
class FixedKLController:
    """Constant coefficient."""

    value: float
    """The coefficient."""

    def update(self, kl: float, sequences: int) -> None:
        """Keep the value."""


@dataclass
class AdaptiveKLController:
    """Coefficient that grows while the KL is above `target`, and shrinks while the KL is below it.

    `value` is the only state; a checkpoint must contain it.

    Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2.
    """

    value: float
    """The coefficient."""
    target: float
    """Target of the mean KL per token, in nats."""
    horizon: int
    """Number of sequences after which a KL >= 1.2 times the target has multiplied the coefficient by about e^0.2."""

    def __post_init__(self):
        for name, number in (("kl_target", self.target), ("horizon", self.horizon)):
            if not number > 0:
                raise ValueError(f"kl_ctrl.{name}={number} must be positive; the adaptive controller divides by it")

    def update(self, kl: float, sequences: int) -> None:
        """Update the value after a batch of `sequences` sequences with a mean KL of `kl`.

        Raises ValueError if `sequences` is so large that the value could become negative.
        """
        if sequences >= 5 * self.horizon:
            raise ValueError(
                f"kl_ctrl.horizon={self.horizon} is too short for batches of {sequences} sequences, after which the "
                f"coefficient could be negative; use more than {sequences // 5}"
            )
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * sequences / self.horizon


KLController = FixedKLController | AdaptiveKLController


def kl_controller(type: str, kl_loss_coef: float, *, kl_target: float, horizon: int) -> KLController:
    """Return the controller of `kl_ctrl`, with the initial value `kl_loss_coef`.

    Raises ValueError for an unknown type.
    """
    if type == "fixed":
        return FixedKLController(kl_loss_coef)
    if type == "adaptive":
        return AdaptiveKLController(kl_loss_coef, kl_target, horizon)
    raise ValueError(f"kl_ctrl.type={type!r} is unknown; use fixed or adaptive")


def _difference(a: Tokens, b: Tokens) -> Tokens:
    """Return the log-ratio, clipped so that all estimators are finite."""
    difference = a - b
    return array_namespace(difference).clip(difference, -LARGEST, LARGEST)
