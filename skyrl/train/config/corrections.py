"""Off-policy corrections: what is done about the difference between the sampler's and the trainer's probabilities."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import PositiveFloat

from skyrl.train.config.machinery.base import BaseConfig
from skyrl.train.config.machinery.fields import one_of


@dataclass
class OffPolicyCorrectionConfig(BaseConfig):
    """Truncated importance sampling and masks. The ratio is that of the trained over the sampling policy."""

    tis_ratio_type: Annotated[str | None, one_of(None, "token", "sequence")] = None
    """Importance ratio that weights the loss, truncated: token (of each token) or sequence (of its sequence). None: no
    weights."""

    token_tis_ratio_clip_high: PositiveFloat = 2.0
    """Bound of the weight with tis_ratio_type=token."""

    sequence_tis_ratio_clip_high: PositiveFloat = 5.0
    """Bound of the weight with tis_ratio_type=sequence."""

    sequence_mask_metric: Annotated[str | None, one_of(None, "product", "geometric")] = None
    """Ratio that masks whole sequences: the product or the geometric mean of the ratios of their tokens. None: no
    masking."""

    geo_mask_high: PositiveFloat = 1.01
    """Highest geometric mean that is kept."""

    geo_mask_low: PositiveFloat = 0.99
    """Lowest geometric mean that is kept."""

    product_mask_high: PositiveFloat = 2.0
    """Highest product that is kept."""

    product_mask_low: PositiveFloat = 0.5
    """Lowest product that is kept."""

    outlier_token_is_threshold_low: PositiveFloat | None = None
    """Sequences with a token of a lower ratio are left out. None: no such bound."""

    outlier_token_is_threshold_high: PositiveFloat | None = None
    """Sequences with a token of a higher ratio are left out. None: no such bound."""

    token_mask_is_threshold_low: PositiveFloat | None = None
    """Tokens of a lower ratio are left out. None: no such bound."""

    token_mask_is_threshold_high: PositiveFloat | None = None
    """Tokens of a higher ratio are left out. None: no such bound."""

    @property
    def corrects(self) -> bool:
        """True if anything is corrected, for which the sampler's log-probabilities are needed."""
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
