"""Options that only one policy loss has."""

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import NonNegativeFloat, PositiveFloat

from skyrl.config.machinery.base import BaseConfig
from skyrl.config.machinery.fields import Fraction


@dataclass
class SAPOConfig(BaseConfig):
    """Soft gates of policy_loss_type=sapo."""

    tau_pos: PositiveFloat = 1.0
    """Sharpness of the gate for positive advantages (called temperature in the paper)."""

    tau_neg: PositiveFloat = 1.05
    """Sharpness of the gate for other advantages (called temperature in the paper)."""


@dataclass
class ClipCovConfig(BaseConfig):
    """Options of policy_loss_type=clip_cov."""

    clip_ratio: Fraction = 0.0002
    """Number of clipped tokens as a fraction of all tokens. They are drawn from those that may be clipped."""

    clip_cov_lb: float = 1.0
    """A token may be clipped only if its covariance is above this value."""

    clip_cov_ub: float = 5.0
    """A token may be clipped only if its covariance is below this value."""

    def problems(self) -> Iterator[str]:
        if self.clip_cov_lb >= self.clip_cov_ub:
            yield f"clip_cov_lb={self.clip_cov_lb} must be less than clip_cov_ub={self.clip_cov_ub}; lower it"


@dataclass
class KLCovConfig(BaseConfig):
    """Options of policy_loss_type=kl_cov."""

    kl_cov_frac: Fraction = 0.2
    """Fraction of tokens that get a KL penalty. The tokens with the highest covariance are selected."""

    ppo_kl_coef: NonNegativeFloat = 1.0
    """Coefficient of the KL penalty."""


@dataclass
class CISPOConfig(BaseConfig):
    """Options of policy_loss_type=cispo. The ratio is clipped to [1 - low, 1 + high]."""

    cispo_eps_clip_low: NonNegativeFloat = 0.0
    """1 minus the lower bound on the ratio. 0: ratios below 1 are clipped to 1. 1 or more: no lower bound."""

    cispo_eps_clip_high: NonNegativeFloat = 5.0
    """Upper bound on the ratio, minus 1."""
