"""Options of the algorithm that have no effect because of the value of another option.

They cause a warning, not an error, because a sweep over losses may set the options of all losses.
"""

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyrl.config.algorithm import AlgorithmConfig

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


def unread(algorithm: "AlgorithmConfig") -> Iterator[str]:
    """Yield a message for each field that differs from its default but is not read."""
    defaults = type(algorithm)()
    for path, switch, values in READ_WITH:
        value, position = attrgetter(path)(algorithm), attrgetter(switch)(algorithm)
        known = position in DOCUMENTED.get(switch, (position,))
        if known and position not in values and value != attrgetter(path)(defaults):
            wanted = " or ".join(map(str, values))
            yield f"{path}={value} is read with {switch}={wanted} only, not with {switch}={position}; leave it out"
