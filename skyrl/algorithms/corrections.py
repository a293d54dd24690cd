"""Off-policy corrections: factors that compensate for differences between sampler and trainer probabilities.

The ratio of a token is its probability under the policy at the start of the step ("old"), divided by its probability
in the sampling engine ("rollout"). Tokens and sequences with extreme ratios are masked. The remaining tokens may be
multiplied by their ratios (truncated importance sampling). The result is a constant factor per token for the policy
loss (`LossInputs.correction`). Token weights do not change, so masking shrinks the gradient.
"""

from typing import Any, NamedTuple

from array_api_compat import array_namespace
from jaxtyping import Bool

from skyrl.algorithms.arrays import Mask, Tokens, count, is_set, select
from skyrl.algorithms.losses import MAX_LOG_RATIO
from skyrl.config.algorithm import OffPolicyCorrectionConfig


class Correction(NamedTuple):
    """Correction of a batch."""

    factor: Tokens
    """Factor of each token's policy loss, `[batch, tokens]`: 0 for masked tokens and outside the loss mask."""
    metrics: dict[str, float]
    """Metrics by name: statistics of the ratios, and the fractions of tokens and sequences masked or clipped."""


def correct_off_policy(
    settings: OffPolicyCorrectionConfig, old_logprobs: Tokens, rollout_logprobs: Tokens, mask: Mask
) -> Correction:
    """Return the correction of a batch with one sequence per row.

    Corrections apply in this order: outlier mask, token mask, importance weights, sequence mask. Sequence ratios use
    only tokens that no mask has removed. Bounds are inclusive.

    Args:
        settings: `trainer.algorithm.off_policy_correction`, which documents the settings.
        old_logprobs: Log-probabilities from the policy at the start of the step, in nats.
        rollout_logprobs: Log-probabilities from the sampling engine, in nats.
        mask: Loss mask, non-zero for tokens that count.
    """
    xp = array_namespace(old_logprobs)
    counted = is_set(mask)
    log_ratio = select(counted, old_logprobs - rollout_logprobs)
    ratio = _exp(log_ratio)
    metrics = _ratio_metrics(ratio, counted)

    low, high = settings.outlier_token_is_threshold_low, settings.outlier_token_is_threshold_high
    outliers = xp.any(counted & ~_within(ratio, low, high), axis=1)
    metrics["outlier_sequences"] = _fraction(outliers, xp.any(counted, axis=1))
    kept = counted & ~outliers[:, None]

    inside = _within(ratio, settings.token_mask_is_threshold_low, settings.token_mask_is_threshold_high)
    metrics["masked_tokens"] = _fraction(~inside, kept)
    kept = kept & inside

    factor = xp.astype(kept, ratio.dtype)
    log_product = xp.sum(select(kept, log_ratio), axis=1)
    if settings.tis_ratio_type == "token":
        metrics["clipped_tokens"] = _fraction(ratio > settings.token_tis_ratio_clip_high, kept)
        factor = factor * xp.clip(ratio, None, settings.token_tis_ratio_clip_high)
    elif settings.tis_ratio_type == "sequence":
        product = _exp(log_product)
        metrics["clipped_sequences"] = _fraction(product > settings.sequence_tis_ratio_clip_high, xp.any(kept, axis=1))
        factor = factor * xp.clip(product, None, settings.sequence_tis_ratio_clip_high)[:, None]

    if settings.sequence_mask_metric is not None:
        if settings.sequence_mask_metric == "geometric":
            tokens = count(kept, ratio)
            statistic = _exp(log_product / xp.where(tokens > 0, tokens, 1.0))
            inside = _within(statistic, settings.geo_mask_low, settings.geo_mask_high)
        else:
            inside = _within(_exp(log_product), settings.product_mask_low, settings.product_mask_high)
        metrics["masked_sequences"] = _fraction(~inside, xp.any(kept, axis=1))
        factor = factor * xp.astype(inside, factor.dtype)[:, None]
    return Correction(factor, metrics)


def _exp(log_ratio: Any) -> Any:
    """Return exp of the log-ratio, clipped to stay finite."""
    xp = array_namespace(log_ratio)
    return xp.exp(xp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _within(ratio: Any, low: float | None, high: float | None) -> Any:
    """Return True for each ratio within the inclusive bounds. None means no bound."""
    xp = array_namespace(ratio)
    inside = xp.ones_like(ratio, dtype=xp.bool)
    if low is not None:
        inside = inside & (ratio >= low)
    if high is not None:
        inside = inside & (ratio <= high)
    return inside


def _fraction(chosen: Bool[Any, "*batch"], among: Bool[Any, "*batch"]) -> float:
    """Return the fraction of the elements in `among` that are chosen, from 0 to 1."""
    xp = array_namespace(chosen)
    total = int(xp.sum(xp.astype(among, xp.int32)))
    return int(xp.sum(xp.astype(chosen & among, xp.int32))) / max(total, 1)


def _ratio_metrics(ratio: Tokens, counted: Bool[Any, "batch tokens"]) -> dict[str, float]:
    """Return mean, standard deviation, minimum and maximum of the counted ratios. Without ratios: 1, 0, 1 and 1."""
    xp = array_namespace(ratio)
    if not bool(xp.any(counted)):
        return {"ratio_mean": 1.0, "ratio_std": 0.0, "ratio_min": 1.0, "ratio_max": 1.0}
    ratios = ratio[counted]
    return {
        "ratio_mean": float(xp.mean(ratios)),
        "ratio_std": float(xp.std(ratios)),
        "ratio_min": float(xp.min(ratios)),
        "ratio_max": float(xp.max(ratios)),
    }
