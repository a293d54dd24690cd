"""Options of the policy losses that have some of their own."""

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import NonNegativeFloat, PositiveFloat

from skyrl.train.config.machinery.base import BaseConfig
from skyrl.train.config.machinery.fields import Fraction


@dataclass
class SAPOConfig(BaseConfig):
    """Soft gates of policy_loss_type=sapo."""

    tau_pos: PositiveFloat = 1.0
    """Temperature of the gate for positive advantages."""

    tau_neg: PositiveFloat = 1.05
    """Temperature of the gate for the other advantages."""


@dataclass
class ClipCovConfig(BaseConfig):
    """Options of policy_loss_type=clip_cov."""

    clip_ratio: Fraction = 0.0002
    """Fraction of tokens that are clipped."""

    clip_cov_lb: float = 1.0
    """Covariance above which a token may be clipped."""

    clip_cov_ub: float = 5.0
    """Covariance below which a token may be clipped."""

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
    """Distance of the lower bound from 1. 0: ratios below 1 are clipped to 1; 1 or more: no lower bound."""

    cispo_eps_clip_high: NonNegativeFloat = 5.0
    """Distance of the upper bound from 1."""
