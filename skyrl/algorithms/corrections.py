"""Off-policy corrections: factors that make up for a sampler whose probabilities are not the trainer's.

The ratio of a token is its probability under the policy at the start of the step ("old") over that under the engine
that sampled it ("rollout"). Tokens and sequences are masked by their ratios, and the rest may be weighted by them
(truncated importance sampling). The result is a constant factor per token for the policy loss
(`LossInputs.correction`). Token weights stay as they are, so that what is masked makes the gradient smaller.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from array_api_compat import array_namespace
from jaxtyping import Bool

from skyrl.algorithms.arrays import Mask, Tokens, count, is_set, select
from skyrl.algorithms.losses import MAX_LOG_RATIO

TIS_RATIO_TYPES = ("token", "sequence")
SEQUENCE_MASK_METRICS = ("geometric", "product")


class Correction(NamedTuple):
    """What a batch's ratios make of it."""

    factor: Tokens
    """Factor of each token's policy loss, `[batch, tokens]`: 0 where masked, 0 outside the loss mask."""
    metrics: dict[str, float]
    """Means over the tokens (or sequences) that count, by name."""


@dataclass(frozen=True)
class OffPolicyCorrection:
    """Which corrections there are. The fields are the options of `off_policy_correction`; all bounds are ratios.

    They act in the order outlier mask, token mask, importance weights, sequence mask; ratios of sequences are those of
    the tokens that are left. Raises ValueError for unknown names and for bounds that leave nothing.
    """

    tis_ratio_type: str | None = None
    """`token` weights each token by its ratio, `sequence` by the product of its sequence's; None is without."""
    token_tis_ratio_clip_high: float = 2.0
    """Upper bound on the weight of a token."""
    sequence_tis_ratio_clip_high: float = 5.0
    """Upper bound on the weight of a sequence."""
    sequence_mask_metric: str | None = None
    """What masks whole sequences: the `geometric` mean or the `product` of their tokens' ratios; None is without."""
    geo_mask_high: float = 1.01
    geo_mask_low: float = 0.99
    product_mask_high: float = 2.0
    product_mask_low: float = 0.5
    outlier_token_is_threshold_low: float | None = None
    """A token with a lower ratio masks its whole sequence; None is without."""
    outlier_token_is_threshold_high: float | None = None
    """A token with a higher ratio masks its whole sequence; None is without."""
    token_mask_is_threshold_low: float | None = None
    """Tokens with a lower ratio are masked; None is without."""
    token_mask_is_threshold_high: float | None = None
    """Tokens with a higher ratio are masked; None is without."""

    def __post_init__(self):
        for name, known in (
            ("tis_ratio_type", TIS_RATIO_TYPES),
            ("sequence_mask_metric", SEQUENCE_MASK_METRICS),
        ):
            if (value := getattr(self, name)) is not None and value not in known:
                raise ValueError(
                    f"off_policy_correction.{name}={value!r} is unknown; use {' or '.join(known)}, or null"
                )
        for name in ("token_tis_ratio_clip_high", "sequence_tis_ratio_clip_high"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"off_policy_correction.{name}={getattr(self, name)} must be above 0; it bounds ratios"
                )
        for low, high in (
            ("geo_mask_low", "geo_mask_high"),
            ("product_mask_low", "product_mask_high"),
            ("outlier_token_is_threshold_low", "outlier_token_is_threshold_high"),
            ("token_mask_is_threshold_low", "token_mask_is_threshold_high"),
        ):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and not least <= most:
                raise ValueError(
                    f"off_policy_correction.{low}={least} is above {high}={most}, which masks everything; both are "
                    "ratios around 1"
                )

    @property
    def active(self) -> bool:
        """Whether anything is corrected: then the rollouts must have log-probabilities."""
        thresholds = (
            self.outlier_token_is_threshold_low,
            self.outlier_token_is_threshold_high,
            self.token_mask_is_threshold_low,
            self.token_mask_is_threshold_high,
        )
        return any(option is not None for option in (self.tis_ratio_type, self.sequence_mask_metric, *thresholds))

    def __call__(self, old_logprobs: Tokens, rollout_logprobs: Tokens, mask: Mask) -> Correction:
        """The correction of a batch with one sequence per row.

        Args:
            old_logprobs: Under the policy at the start of the step, in nats.
            rollout_logprobs: Under the engine that sampled, in nats.
            mask: The loss mask, non-zero where a token counts.
        """
        xp = array_namespace(old_logprobs)
        counted = is_set(mask)
        log_ratio = select(counted, old_logprobs - rollout_logprobs)
        ratio = _exp(log_ratio)
        metrics = _ratio_metrics(ratio, counted)

        low, high = self.outlier_token_is_threshold_low, self.outlier_token_is_threshold_high
        outliers = xp.any(counted & ~_within(ratio, low, high), axis=1)
        metrics["outlier_sequences"] = _fraction(outliers, xp.any(counted, axis=1))
        kept = counted & ~outliers[:, None]

        inside = _within(ratio, self.token_mask_is_threshold_low, self.token_mask_is_threshold_high)
        metrics["masked_tokens"] = _fraction(~inside, kept)
        kept = kept & inside

        factor = xp.astype(kept, ratio.dtype)
        log_product = xp.sum(select(kept, log_ratio), axis=1)
        if self.tis_ratio_type == "token":
            metrics["clipped_tokens"] = _fraction(ratio > self.token_tis_ratio_clip_high, kept)
            factor = factor * xp.clip(ratio, None, self.token_tis_ratio_clip_high)
        elif self.tis_ratio_type == "sequence":
            product = _exp(log_product)
            metrics["clipped_sequences"] = _fraction(product > self.sequence_tis_ratio_clip_high, xp.any(kept, axis=1))
            factor = factor * xp.clip(product, None, self.sequence_tis_ratio_clip_high)[:, None]

        if self.sequence_mask_metric is not None:
            if self.sequence_mask_metric == "geometric":
                tokens = count(kept, ratio)
                statistic = _exp(log_product / xp.where(tokens > 0, tokens, 1.0))
                inside = _within(statistic, self.geo_mask_low, self.geo_mask_high)
            else:
                inside = _within(_exp(log_product), self.product_mask_low, self.product_mask_high)
            metrics["masked_sequences"] = _fraction(~inside, xp.any(kept, axis=1))
            factor = factor * xp.astype(inside, factor.dtype)[:, None]
        return Correction(factor, metrics)


def _exp(log_ratio: Any) -> Any:
    """The ratio, finite whatever the log-ratio."""
    xp = array_namespace(log_ratio)
    return xp.exp(xp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _within(ratio: Any, low: float | None, high: float | None) -> Any:
    """Whether each ratio lies between the bounds, bounds included; None is no bound."""
    xp = array_namespace(ratio)
    inside = xp.ones_like(ratio, dtype=xp.bool)
    if low is not None:
        inside = inside & (ratio >= low)
    if high is not None:
        inside = inside & (ratio <= high)
    return inside


def _fraction(chosen: Bool[Any, "*batch"], among: Bool[Any, "*batch"]) -> float:
    """How many of the elements `among` are chosen, from 0 to 1."""
    xp = array_namespace(chosen)
    total = int(xp.sum(xp.astype(among, xp.int32)))
    return int(xp.sum(xp.astype(chosen & among, xp.int32))) / max(total, 1)


def _ratio_metrics(ratio: Tokens, counted: Bool[Any, "batch tokens"]) -> dict[str, float]:
    """Mean, standard deviation, least and greatest ratio of the tokens that count; 1 and 0 if there are none."""
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
