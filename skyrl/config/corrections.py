"""Off-policy corrections for the difference between the sampler's and the trainer's probabilities."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import PositiveFloat

from skyrl.config.machinery.base import BaseConfig
from skyrl.config.machinery.fields import one_of


@dataclass
class OffPolicyCorrectionConfig(BaseConfig):
    """Truncated importance sampling and masks. A ratio is the trained policy's probability divided by the sampler's."""

    tis_ratio_type: Annotated[str | None, one_of(None, "token", "sequence")] = None
    """Weight that multiplies a token's loss. token: the token's own ratio. sequence: the product of the ratios in its
    sequence. Both are truncated. None: no weights."""

    token_tis_ratio_clip_high: PositiveFloat = 2.0
    """Upper bound on the weight with tis_ratio_type=token."""

    sequence_tis_ratio_clip_high: PositiveFloat = 5.0
    """Upper bound on the weight with tis_ratio_type=sequence."""

    sequence_mask_metric: Annotated[str | None, one_of(None, "product", "geometric")] = None
    """Mask sequences whose metric is out of bounds. The metric is the product or the geometric mean of the ratios of
    the sequence's tokens. None: mask no sequences."""

    geo_mask_high: PositiveFloat = 1.01
    """With sequence_mask_metric=geometric, mask sequences whose geometric mean is higher."""

    geo_mask_low: PositiveFloat = 0.99
    """With sequence_mask_metric=geometric, mask sequences whose geometric mean is lower."""

    product_mask_high: PositiveFloat = 2.0
    """With sequence_mask_metric=product, mask sequences whose product is higher."""

    product_mask_low: PositiveFloat = 0.5
    """With sequence_mask_metric=product, mask sequences whose product is lower."""

    outlier_token_is_threshold_low: PositiveFloat | None = None
    """Mask sequences that contain a token with a lower ratio. None: no lower bound."""

    outlier_token_is_threshold_high: PositiveFloat | None = None
    """Mask sequences that contain a token with a higher ratio. None: no upper bound."""

    token_mask_is_threshold_low: PositiveFloat | None = None
    """Mask tokens with a lower ratio. None: no lower bound."""

    token_mask_is_threshold_high: PositiveFloat | None = None
    """Mask tokens with a higher ratio. None: no upper bound."""

    @property
    def corrects(self) -> bool:
        """True if any correction is configured. Corrections need the sampler's log-probabilities."""
        return any(
            setting is not None
            for setting in (
                self.tis_ratio_type,
                self.sequence_mask_metric,
                self.outlier_token_is_threshold_low,
                self.outlier_token_is_threshold_high,
                self.token_mask_is_threshold_low,
                self.token_mask_is_threshold_high,
            )
        )

    def problems(self) -> Iterator[str]:
        for low_name, high_name in (
            ("geo_mask_low", "geo_mask_high"),
            ("product_mask_low", "product_mask_high"),
            ("outlier_token_is_threshold_low", "outlier_token_is_threshold_high"),
            ("token_mask_is_threshold_low", "token_mask_is_threshold_high"),
        ):
            low, high = getattr(self, low_name), getattr(self, high_name)
            if low is not None and high is not None and low > high:
                yield f"{low_name}={low} is above {high_name}={high}, so that nothing is kept; lower it"
