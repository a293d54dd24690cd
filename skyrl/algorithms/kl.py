"""KL divergence of the policy from a reference: per-token estimators, the penalty on rewards, and its controllers.

An estimator is a function of two log-probabilities of the same sampled token and never reduces. It is differentiable in
the first; as a loss its terms are weighted like the policy's.
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
    """The log-ratio: unbiased as a value, of any sign. As a loss its mean gradient is 0."""
    return _difference(logprobs, reference_logprobs)


@KL_ESTIMATORS.register("abs")
def absolute(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """The log-ratio without its sign; 0 within rounding (`arrays.magnitude`)."""
    return magnitude(_difference(logprobs, reference_logprobs))


@KL_ESTIMATORS.register("k2")
def k2(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """Half the squared log-ratio: as a loss, its mean gradient is that of the reverse KL divergence."""
    difference = _difference(logprobs, reference_logprobs)
    return 0.5 * difference * difference


@KL_ESTIMATORS.register("k3")
def k3(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """exp(d) - 1 - d with d = reference minus policy: unbiased as a value and never negative.

    Beyond d = 20 the exponential goes on as its tangent, so that every value is finite and the gradient does not vanish
    where the divergence is largest.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    xp = array_namespace(logprobs)
    difference = _difference(reference_logprobs, logprobs)
    large = difference > MAX_LOG_RATIO
    inside = xp.where(large, MAX_LOG_RATIO, difference)
    # Selected, not computed as difference - inside: gradients of e^20 would cancel and take the others' digits along.
    beyond = xp.where(large, difference - MAX_LOG_RATIO, 0.0)
    return xp.expm1(inside) + math.exp(MAX_LOG_RATIO) * beyond - difference


def penalise_rewards(rewards: Tokens, kl: Tokens, mask: Mask, coefficient: float) -> Tokens:
    """Rewards minus `coefficient` times the KL of each token of the mask (`use_kl_in_reward`), `[batch, tokens]`.

    `coefficient` is a controller's `value`.
    """
    return rewards - coefficient * select(mask, kl)


def mean_kl(kl: Tokens, mask: Mask) -> float:
    """Mean over sequences of the mean over their tokens: what the controllers follow. Rows without tokens do not count.

    0 for a batch without tokens.
    """
    xp = array_namespace(kl)
    counts = count(mask, kl)
    live = counts > 0
    means = xp.sum(select(mask, kl), axis=1) / xp.where(live, counts, 1.0)
    return float(xp.sum(means)) / max(int(xp.sum(xp.astype(live, xp.int32))), 1)


@dataclass
class FixedKLController:
    """A coefficient that stays as it is."""

    value: float
    """The coefficient."""

    def update(self, kl: float, sequences: int) -> None:
        """Keep the value, whatever the KL was."""


@dataclass
class AdaptiveKLController:
    """A coefficient that grows while the KL is above its target and shrinks while it is below.

    `value` is all its state: a checkpoint has to keep it.

    Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2.
    """

    value: float
    """The coefficient."""
    target: float
    """Wanted mean KL per token, in nats."""
    horizon: int
    """Sequences over which a KL of 1.2 times the target or more multiplies the coefficient by about e^0.2."""

    def __post_init__(self):
        for name, number in (("kl_target", self.target), ("horizon", self.horizon)):
            if not number > 0:
                raise ValueError(f"kl_ctrl.{name}={number} must be positive; the adaptive controller divides by it")

    def update(self, kl: float, sequences: int) -> None:
        """Move the value after a batch of `sequences` whose mean was `kl`.

        Raises ValueError for so many sequences that the value could become negative.
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
    """The controller that `kl_ctrl` asks for, starting at `kl_loss_coef`. Raises ValueError for an unknown type."""
    if type == "fixed":
        return FixedKLController(kl_loss_coef)
    if type == "adaptive":
        return AdaptiveKLController(kl_loss_coef, kl_target, horizon)
    raise ValueError(f"kl_ctrl.type={type!r} is unknown; use fixed or adaptive")


def _difference(a: Tokens, b: Tokens) -> Tokens:
    """The log-ratio, bounded so that every estimator stays finite."""
    difference = a - b
    return array_namespace(difference).clip(difference, -LARGEST, LARGEST)
