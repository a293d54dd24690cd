"""The RL algorithm: advantages, policy loss, KL, corrections and filters."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from skyrl.config.machinery.base import BaseConfig
from skyrl.config.machinery.fields import Fraction, one_of
from skyrl.config.machinery.uses import sets


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


@dataclass
class KLCtrlConfig(BaseConfig):
    """Coefficient of the KL penalty in the reward."""

    type: Annotated[str, one_of("fixed", "adaptive")] = "fixed"
    """fixed keeps kl_loss_coef; adaptive moves it so that the KL approaches kl_target."""

    kl_target: PositiveFloat = 0.1
    """KL per token that the adaptive controller aims at, in nats."""

    horizon: PositiveInt = 10000
    """Time constant of the adaptive controller, in sequences. A larger value changes the coefficient more slowly."""


@dataclass
class DynamicSamplingConfig(BaseConfig):
    """Treatment of prompts whose samples all get the same reward."""

    type: Annotated[str | None, one_of(None, "filter", "replace")] = None
    """filter: keep only prompts whose samples have different rewards, and sample until there are enough. replace: keep
    these prompts and use copies of them in place of the others. None: keep all prompts."""

    max_sample_batches: int = 30
    """Maximum number of batches sampled for one step. 0 or less: no limit."""

    min_replace_ratio: Fraction = 0.3
    """With type=replace: sample the batch again if at most this fraction of its prompts has samples with different
    rewards."""


@dataclass
class AlgorithmConfig(BaseConfig):
    """The RL algorithm."""

    advantage_estimator: str = "grpo"
    """grpo, rloo, reinforce++, token_rewards, gae, maxrl, the name of a registered estimator, or module:function."""

    kl_ctrl: KLCtrlConfig = field(default_factory=KLCtrlConfig)
    """Coefficient of the KL penalty in the reward."""

    kl_estimator_type: str = "k3"
    """Estimator of the KL divergence per token: k1, k2, k3, abs, the name of a registered one, or module:function."""

    use_kl_in_reward: bool = False
    """Subtract a KL penalty (divergence from the reference model) from the rewards."""

    use_kl_loss: bool = True
    """Add a KL penalty (divergence from the reference model) to the loss."""

    kl_loss_coef: NonNegativeFloat = 0.001
    """Coefficient of the KL divergence in the loss or in the reward. With kl_ctrl.type=adaptive, only the initial
    value."""

    use_entropy_loss: bool = False
    """Subtract the policy's entropy from the loss."""

    entropy_loss_coef: float = 0.01
    """Coefficient of the entropy."""

    temperature: NonNegativeFloat | None = None
    """Temperature of the trained policy. None: generator.sampling_params.temperature."""

    advantage_batch_normalize: bool = False
    """Normalise advantages over the tokens of the batch."""

    value_head_prefix: Annotated[str, sets("value_head")] = "value_head"
    """Name of the critic's value head among its weights."""

    policy_loss_type: str = "regular"
    """regular, dual_clip, gspo, sapo, cispo, clip_cov, kl_cov, the name of a registered loss, or module:function."""

    loss_reduction: Annotated[str, one_of("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")] = (
        "token_mean"
    )
    """Weighting of a mini-batch's tokens: token_mean, sequence_mean, seq_mean_token_sum_norm or prompt_mean."""

    grpo_norm_by_std: bool = True
    """Divide advantages of grpo by the standard deviation of the group's rewards."""

    zero_variance_filter: bool = False
    """Exclude prompts from the loss if all their samples get the same reward."""

    lambd: Fraction = 1.0
    """Lambda of gae."""

    gamma: Fraction = 1.0
    """Discount per token of gae and reinforce++."""

    eps_clip_low: Fraction = 0.2
    """1 minus the lower bound on the probability ratio."""

    eps_clip_high: NonNegativeFloat = 0.2
    """Upper bound on the probability ratio, minus 1."""

    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """In dual_clip, upper bound on the probability ratio for negative advantages."""

    tis_imp_ratio_cap: float = -1.0
    """Old name of off_policy_correction.token_tis_ratio_clip_high, read with use_tis."""

    use_tis: bool = False
    """Old name of off_policy_correction.tis_ratio_type=token."""

    off_policy_correction: OffPolicyCorrectionConfig = field(default_factory=OffPolicyCorrectionConfig)
    """Corrections for the difference between the sampling policy and the trained policy."""

    sapo: SAPOConfig = field(default_factory=SAPOConfig)
    """Options of policy_loss_type=sapo."""

    value_clip: PositiveFloat = 0.2
    """Maximum distance of the clipped value from the old value in the critic's loss."""

    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    """Treatment of prompts whose samples all get the same reward."""

    clip_cov: ClipCovConfig = field(default_factory=ClipCovConfig)
    """Options of policy_loss_type=clip_cov."""

    kl_cov: KLCovConfig = field(default_factory=KLCovConfig)
    """Options of policy_loss_type=kl_cov."""

    cispo: CISPOConfig = field(default_factory=CISPOConfig)
    """Options of policy_loss_type=cispo."""

    max_seq_len: PositiveInt | None = None
    """Number of tokens that seq_mean_token_sum_norm divides by. None: the maximum sequence length; single-turn only."""

    @property
    def uses_reference(self) -> bool:
        """True if a reference model is needed."""
        return self.use_kl_loss or self.use_kl_in_reward

    def derive(self) -> None:
        correction = self.off_policy_correction
        if self.use_tis and correction.tis_ratio_type is None and self.tis_imp_ratio_cap > 0:
            correction.tis_ratio_type = "token"
            correction.token_tis_ratio_clip_high = self.tis_imp_ratio_cap

    def problems(self) -> Iterator[str]:
        if self.use_kl_in_reward and self.use_kl_loss:
            yield "use_kl_in_reward=True and use_kl_loss=True count the divergence twice; set one of them to False"
        if self.kl_ctrl.type == "adaptive" and not self.use_kl_in_reward:
            yield (
                "kl_ctrl.type=adaptive and use_kl_in_reward=False: only the penalty in the reward is controlled; "
                "set use_kl_in_reward=True (and use_kl_loss=False), or kl_ctrl.type=fixed"
            )
        if self.advantage_estimator == "maxrl" and self.use_kl_in_reward:
            yield (
                "advantage_estimator=maxrl and use_kl_in_reward=True: its scores are successes, and the penalty makes "
                "them negative; set use_kl_in_reward=False (use_kl_loss=True keeps the KL), or another estimator"
            )
        if self.temperature == 0:
            yield (
                "temperature=0 makes log-probabilities 0 or -inf; set generator.sampling_params.temperature "
                "above 0 (greedy evaluation is generator.eval_sampling_params.temperature=0)"
            )
        if self.loss_reduction == "seq_mean_token_sum_norm" and self.max_seq_len is None:
            yield (
                "loss_reduction=seq_mean_token_sum_norm and max_seq_len=None: the longest sequence is not known with "
                "several turns; set max_seq_len"
            )
        yield from self._old_names()
        if self.policy_loss_type in ("clip_cov", "kl_cov") and self.off_policy_correction.corrects:
            yield (
                f"policy_loss_type={self.policy_loss_type} and off_policy_correction: its choice of tokens is not "
                "defined under a correction; take policy_loss_type=regular, or leave the corrections out"
            )

    def _old_names(self) -> Iterator[str]:
        correction = self.off_policy_correction
        if self.use_tis and self.tis_imp_ratio_cap <= 0:
            yield (
                f"use_tis=True and tis_imp_ratio_cap={self.tis_imp_ratio_cap}: a ratio is capped at more than 0; set "
                "tis_imp_ratio_cap=2.0, or off_policy_correction.tis_ratio_type=token without use_tis"
            )
        elif self.use_tis and (correction.tis_ratio_type, correction.token_tis_ratio_clip_high) != (
            "token",
            self.tis_imp_ratio_cap,
        ):
            yield (
                f"use_tis=True with tis_imp_ratio_cap={self.tis_imp_ratio_cap} and off_policy_correction with "
                f"tis_ratio_type={correction.tis_ratio_type}, token_tis_ratio_clip_high="
                f"{correction.token_tis_ratio_clip_high} say different things; set use_tis=False"
            )

    def cautions(self) -> Iterator[str]:
        yield from unread(self)
        if self.use_tis:
            yield (
                "use_tis and tis_imp_ratio_cap are old names of off_policy_correction.tis_ratio_type=token and "
                "off_policy_correction.token_tis_ratio_clip_high; set those"
            )
        low, high = self.cispo.cispo_eps_clip_low, self.cispo.cispo_eps_clip_high
        if self.policy_loss_type == "cispo" and low == 0:
            yield (
                f"cispo.cispo_eps_clip_low={low} and cispo_eps_clip_high={high} clip the ratio to [1, {1 + high:g}], "
                "so that tokens which became less likely count as if they had not; cispo_eps_clip_low=1 and "
                "cispo_eps_clip_high=4 clip it to [0, 5]"
            )
        if self.policy_loss_type == "gspo" and min(self.eps_clip_low, self.eps_clip_high) > 0.01:
            yield (
                f"policy_loss_type=gspo with eps_clip_low={self.eps_clip_low} and eps_clip_high={self.eps_clip_high} "
                "clips almost nothing, because the ratio of a sequence is a mean; its authors use 3e-4 and 4e-4"
            )
        if self.policy_loss_type == "gspo" and self.loss_reduction != "sequence_mean":
            yield (f"policy_loss_type=gspo is defined with loss_reduction=sequence_mean, not {self.loss_reduction}")


DOCUMENTED = {
    "policy_loss_type": ("regular", "dual_clip", "gspo", "sapo", "cispo", "clip_cov", "kl_cov"),
    "advantage_estimator": ("grpo", "rloo", "reinforce++", "token_rewards", "gae", "maxrl"),
}
"""Losses and estimators whose options are known. Other registered or imported functions may read any option."""

READ_WITH: list[tuple[str, str, tuple[object, ...]]] = [
    ("sapo.tau_pos", "policy_loss_type", ("sapo",)),
    ("sapo.tau_neg", "policy_loss_type", ("sapo",)),
    ("clip_cov.clip_ratio", "policy_loss_type", ("clip_cov",)),
    ("clip_cov.clip_cov_lb", "policy_loss_type", ("clip_cov",)),
    ("clip_cov.clip_cov_ub", "policy_loss_type", ("clip_cov",)),
    ("kl_cov.kl_cov_frac", "policy_loss_type", ("kl_cov",)),
    ("kl_cov.ppo_kl_coef", "policy_loss_type", ("kl_cov",)),
    ("cispo.cispo_eps_clip_low", "policy_loss_type", ("cispo",)),
    ("cispo.cispo_eps_clip_high", "policy_loss_type", ("cispo",)),
    ("clip_ratio_c", "policy_loss_type", ("dual_clip",)),
    ("lambd", "advantage_estimator", ("gae",)),
    ("gamma", "advantage_estimator", ("gae", "reinforce++")),
    ("grpo_norm_by_std", "advantage_estimator", ("grpo",)),
    ("entropy_loss_coef", "use_entropy_loss", (True,)),
    ("tis_imp_ratio_cap", "use_tis", (True,)),
    ("kl_ctrl.kl_target", "kl_ctrl.type", ("adaptive",)),
    ("kl_ctrl.horizon", "kl_ctrl.type", ("adaptive",)),
    ("dynamic_sampling.max_sample_batches", "dynamic_sampling.type", ("filter", "replace")),
    ("dynamic_sampling.min_replace_ratio", "dynamic_sampling.type", ("replace",)),
    ("off_policy_correction.token_tis_ratio_clip_high", "off_policy_correction.tis_ratio_type", ("token",)),
    ("off_policy_correction.sequence_tis_ratio_clip_high", "off_policy_correction.tis_ratio_type", ("sequence",)),
    ("off_policy_correction.geo_mask_low", "off_policy_correction.sequence_mask_metric", ("geometric",)),
    ("off_policy_correction.geo_mask_high", "off_policy_correction.sequence_mask_metric", ("geometric",)),
    ("off_policy_correction.product_mask_low", "off_policy_correction.sequence_mask_metric", ("product",)),
    ("off_policy_correction.product_mask_high", "off_policy_correction.sequence_mask_metric", ("product",)),
]
"""(field, second field, values of the second field). The field is read only if the second field has such a value."""


def unread(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield a message for each field that differs from its default but is not read."""
    defaults = type(algorithm)()
    for path, switch, values in READ_WITH:
        value, position = attrgetter(path)(algorithm), attrgetter(switch)(algorithm)
        known = position in DOCUMENTED.get(switch, (position,))
        if known and position not in values and value != attrgetter(path)(defaults):
            wanted = " or ".join(map(str, values))
            yield f"{path}={value} is read with {switch}={wanted} only, not with {switch}={position}; leave it out"
