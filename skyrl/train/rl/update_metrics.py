"""Metrics of optimizer steps of policy and critic. They are computed in NumPy from the inputs and outputs of passes."""

import logging
from functools import cache

import numpy as np

from skyrl.algorithms.losses import LossInputs
from skyrl.algorithms.objective import PolicyObjective
from skyrl.train.rl.batch import Array
from skyrl.train.tracking.metrics import Metrics

log = logging.getLogger(__name__)

TOKEN_RATIO, SEQUENCE_RATIO = ("regular", "dual_clip", "ppo"), ("gspo",)
"""Policy losses that clip the ratio of each token, and those that clip the ratio of each sequence."""
LARGEST_LOG_RATIO = 20
MISMATCH_NATS = 0.1
"""Sampler and trainer disagree about a token if its log-probabilities differ by more than this, in nats (ratio 1.1)."""
MISMATCH_KL = 1e-3
"""A run logs a warning if the KL divergence between sampler and trainer is above this, in nats.

bfloat16 engines stay below it.
"""


def policy_metrics(objective: PolicyObjective, x: LossInputs, mask: Array) -> Metrics:
    """Return the terms of the loss, and metrics of how far the policy has moved since the start of the step.

    Args:
        objective: Objective of the pass.
        x: float64 `[rows, tokens]`: inputs of the pass, and the log-probabilities that it returned.
        mask: bool `[rows, tokens]`: True for trained tokens.

    `policy_loss`, `kl_loss` and `entropy_loss` add up to the loss of the pass. `clip_fraction` is the fraction of
    tokens whose gradient the clip removed (as in https://huggingface.co/docs/trl/grpo_trainer). It is 0 in the first
    optimizer step after sampling. `approx_kl` is the k3 estimate of http://joschu.net/blog/kl-approx.html.
    """
    metrics = _terms(objective, x)
    assert x.sampling_logprobs is not None
    moved = np.where(mask, x.logprobs - x.sampling_logprobs, 0.0)
    if not mask.any():
        return metrics
    ratio = np.exp(np.clip(moved[mask], -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    metrics |= {
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "approx_kl": float((ratio - 1 - moved[mask]).mean()),
    }
    if objective.loss.name in SEQUENCE_RATIO:
        means = moved.sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
        ratio = np.exp(np.broadcast_to(means[:, None], mask.shape)[mask])
    elif objective.loss.name not in TOKEN_RATIO:
        return metrics
    assert x.advantages is not None
    low, high = _bounds(objective)
    advantages = x.advantages[mask]
    clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    if objective.loss.name == "dual_clip":
        clipped |= (ratio > objective.knobs["clip_ratio_c"]) & (advantages < 0)
    return metrics | {"clip_fraction": float(clipped.mean())}


def mismatch_metrics(trainer: Array, sampler: Array) -> Metrics:
    """Compare the log-probabilities of trainer and sampler for the same tokens.

    Args:
        trainer: float64 `[tokens]`, in nats.
        sampler: float64 `[tokens]`, in nats.

    `rollout_train_kl` is the k3 estimate (http://joschu.net/blog/kl-approx.html) of KL(sampler || trainer), because the
    sampler drew these tokens. `rollout_train_off_fraction` is the fraction of tokens whose log-probabilities differ by
    more than `MISMATCH_NATS`.
    """
    log_ratio = trainer - sampler
    difference = np.abs(log_ratio)
    kl = np.expm1(np.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)) - log_ratio
    return {
        "rollout_train_logprobs_abs_diff_mean": float(difference.mean()) if difference.size else 0.0,
        "rollout_train_logprobs_abs_diff_max": float(difference.max(initial=0.0)),
        "rollout_train_kl": float(kl.mean()) if kl.size else 0.0,
        "rollout_train_off_fraction": float((difference > MISMATCH_NATS).mean()) if difference.size else 0.0,
    }


def _terms(objective: PolicyObjective, x: LossInputs) -> Metrics:
    try:
        return {f"{name}_loss": float(term.sum()) for name, term in objective.terms(x).items()}
    except Exception as error:  # a loss of one's own that is written for one library of arrays, and trains with it
        _warn_of_terms(objective.loss.name, f"{type(error).__name__}: {error}")
        return {}


@cache
def _warn_of_terms(loss: str, why: str) -> None:
    log.warning(
        "policy_loss_type=%s cannot be computed with NumPy (%s), so metrics have no terms of the loss; write it with "
        "array_api_compat.array_namespace, as the losses of skyrl.algorithms.policy_losses are",
        loss,
        why,
    )


def _bounds(objective: PolicyObjective) -> tuple[float, float]:
    knobs = objective.knobs
    if "clip_low_threshold" in knobs:
        return knobs["clip_low_threshold"], knobs["clip_high_threshold"]
    return 1 - knobs["eps_clip_low"], 1 + knobs["eps_clip_high"]


def advantage_metrics(advantages: Array) -> Metrics:
    """Return statistics of the advantages of all trained tokens."""
    if not advantages.size:
        return {}
    return {
        "loss/avg_raw_advantages_abs": float(np.abs(advantages).mean()),
        "loss/advantages_mean": float(advantages.mean()),
        "loss/advantages_std": float(advantages.std()),
        "loss/advantages_min": float(advantages.min()),
        "loss/advantages_max": float(advantages.max()),
    }


def explained_variance(values: Array, returns: Array) -> float:
    """Return 1 - Var(returns - values) / Var(returns), or 0 if all returns are equal.

    A perfect critic has 1. A critic that always predicts the mean has 0.
    """
    spread = float(returns.var()) if returns.size else 0.0
    return 1 - float((returns - values).var()) / spread if spread else 0.0


def value_clip_fraction(new: Array, old: Array, returns: Array, mask: Array, value_clip: float | None) -> Metrics:
    """Return the fraction of tokens whose loss uses the clipped value, because that is farther from the return."""
    if value_clip is None or not mask.any():
        return {}
    clipped = old + np.clip(new - old, -value_clip, value_clip)
    return {"value_clip_fraction": float(((clipped - returns) ** 2 > (new - returns) ** 2)[mask].mean())}
