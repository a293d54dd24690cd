"""Policy losses of the RL trainer. They have the names and settings of its configuration.

Like the losses of `losses.py`, they compute one number per token, multiplied by `weights`, without a reduction. Here,
`sampling_logprobs` come from the policy at the start of the step ("old"). The settings are epsilons: a ratio is bounded
to 1 minus one epsilon and 1 plus the other. The losses of `losses.py` take the bounds themselves. Formulas are shared.

To add a loss, add a function here, decorate your own function with `PolicyLossRegistry.register("name")`, or set the
option to "module:function". Keyword-only arguments of the function need numbers as defaults. They are filled from the
algorithm options with the same names.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from array_api_compat import array_namespace

from skyrl.algorithms import losses
from skyrl.algorithms.arrays import Tokens, is_set, magnitude
from skyrl.algorithms.losses import ADVANTAGES, CLIPS, LARGEST, OFF_POLICY, Knob, Loss, LossInputs, make_loss
from skyrl.algorithms.options import pick_options
from skyrl.utils.registry import Registry

PolicyLossRegistry: Registry[Loss | Callable[..., Tokens]] = Registry("policy loss")

SELECTED = ("selected",)

for _name in ("cross_entropy", "importance_sampling", "ppo", "dro"):
    PolicyLossRegistry.register(_name)(losses.LOSSES[_name])


def policy_loss(
    name: str, needs: tuple[str, ...] = OFF_POLICY, optional: tuple[str, ...] = (), multiple_of: tuple[str, ...] = ()
) -> Callable[..., Loss]:
    """Register the decorated function as the policy loss `name`. The tuples name `LossInputs` fields (see `Loss`)."""

    def register(function: Callable[..., Tokens]) -> Loss:
        return PolicyLossRegistry.register(name)(make_loss(name, function, needs, optional, multiple_of))

    return register


@policy_loss("regular", optional=CLIPS, multiple_of=ADVANTAGES)
def regular(x: LossInputs, *, eps_clip_low: Knob = 0.2, eps_clip_high: Knob = 0.2) -> Tokens:
    """PPO's clipped surrogate.

    Args:
        x: Token arrays, each `[batch, tokens]`.
        eps_clip_low: 1 minus the lower bound on the ratio.
        eps_clip_high: Upper bound on the ratio minus 1.

    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 7.
    """
    return losses.ppo.function(x, clip_low_threshold=1 - eps_clip_low, clip_high_threshold=1 + eps_clip_high)


@policy_loss("dual_clip", optional=CLIPS, multiple_of=ADVANTAGES)
def dual_clip(
    x: LossInputs, *, eps_clip_low: Knob = 0.2, eps_clip_high: Knob = 0.2, clip_ratio_c: Knob = 3.0
) -> Tokens:
    """Clipped surrogate. For negative advantages, the objective is at least `clip_ratio_c` times the advantage.

    Args:
        x: Token arrays, each `[batch, tokens]`.
        eps_clip_low: 1 minus the lower bound on the ratio.
        eps_clip_high: Upper bound on the ratio minus 1.
        clip_ratio_c: Bound on the ratio of tokens with negative advantage, above 1.

    Source: Ye et al. 2019, https://arxiv.org/abs/1912.09729, equation 5.
    """
    assert x.advantages is not None
    xp = array_namespace(x.logprobs)
    surrogate = regular.function(x, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high)
    return xp.where(x.advantages < 0, xp.minimum(surrogate, -clip_ratio_c * x.advantages), surrogate)


@policy_loss("gspo", needs=(*OFF_POLICY, "sequence_ratio_mask"), optional=CLIPS, multiple_of=ADVANTAGES)
def gspo(x: LossInputs, *, eps_clip_low: Knob = 0.2, eps_clip_high: Knob = 0.2) -> Tokens:
    """PPO with the sequence ratio at each token; see `losses.gspo`. Reads `segments`.

    Args:
        x: Token arrays, each `[batch, tokens]`.
        eps_clip_low: 1 minus the lower bound on the sequence ratio; the paper uses 3e-4.
        eps_clip_high: Upper bound on the sequence ratio minus 1; the paper uses 4e-4.

    Source: Zheng et al. 2025, https://arxiv.org/abs/2507.18071, equations 7 and 14.
    """
    return losses.gspo.function(x, clip_low_threshold=1 - eps_clip_low, clip_high_threshold=1 + eps_clip_high)


@policy_loss("sapo", multiple_of=ADVANTAGES)
def sapo(x: LossInputs, *, tau_pos: Knob = 1.0, tau_neg: Knob = 1.05) -> Tokens:
    """Soft gate instead of a clip. The ratio r is replaced by 4/tau sigmoid(tau (r - 1)), which has slope 1 at r = 1.

    Args:
        x: Token arrays, each `[batch, tokens]`.
        tau_pos: Sharpness of the gate for positive advantages.
        tau_neg: Sharpness of the gate for all other advantages.

    Source: Gao et al. 2025, https://arxiv.org/abs/2511.20347.
    """
    assert x.advantages is not None
    xp = array_namespace(x.logprobs)
    zero = xp.zeros_like(x.logprobs)
    tau = xp.where(x.advantages > 0, tau_pos + zero, tau_neg + zero)
    # sigmoid(z) = (1 + tanh(z / 2)) / 2, which does not overflow for any z.
    gate = 2 / tau * (1 + xp.tanh(0.5 * tau * (losses.probability_ratio(x) - 1)))
    return -gate * x.advantages


@policy_loss("cispo", optional=CLIPS, multiple_of=ADVANTAGES)
def cispo(x: LossInputs, *, cispo_eps_clip_low: Knob = 0.0, cispo_eps_clip_high: Knob = 5.0) -> Tokens:
    """REINFORCE weighted by the clipped ratio, which has no gradient; see `losses.cispo`.

    Args:
        x: Token arrays, each `[batch, tokens]`.
        cispo_eps_clip_low: 1 minus the lower bound on the ratio; 1 means no bound, as in the paper.
        cispo_eps_clip_high: Upper bound on the ratio minus 1.

    Source: MiniMax-M1 2025, https://arxiv.org/abs/2506.13585, equation 4.
    """
    bounds = {"clip_low_threshold": 1 - cispo_eps_clip_low, "clip_high_threshold": 1 + cispo_eps_clip_high}
    return losses.cispo.function(x, **bounds)


@policy_loss("clip_cov", needs=(*OFF_POLICY, *SELECTED), optional=CLIPS, multiple_of=ADVANTAGES)
def clip_cov(x: LossInputs, *, eps_clip_low: Knob = 0.2, eps_clip_high: Knob = 0.2) -> Tokens:
    """Clipped surrogate. It is 0 for selected tokens (`covariance.clip_cov_tokens`).

    Args:
        x: Token arrays, each `[batch, tokens]`.
        eps_clip_low: 1 minus the lower bound on the ratio.
        eps_clip_high: Upper bound on the ratio minus 1.

    Source: Cui et al. 2025, https://arxiv.org/abs/2505.22617.
    """
    surrogate = regular.function(x, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high)
    assert x.selected is not None
    return array_namespace(x.logprobs).where(is_set(x.selected), 0.0, surrogate)


@policy_loss("kl_cov", needs=(*OFF_POLICY, *SELECTED))
def kl_cov(x: LossInputs, *, ppo_kl_coef: Knob = 1.0) -> Tokens:
    """Minus ratio times advantage, plus a log-ratio penalty for selected tokens (`covariance.kl_cov_tokens`).

    Args:
        x: Token arrays, each `[batch, tokens]`.
        ppo_kl_coef: Factor of the absolute log-ratio, which is 0 if it is rounding noise (`arrays.magnitude`).

    Source: Cui et al. 2025, https://arxiv.org/abs/2505.22617.
    """
    assert x.selected is not None
    penalty = ppo_kl_coef * magnitude(x.logprobs - x.sampling_logprobs)
    return -losses.probability_ratio(x) * x.advantages + array_namespace(penalty).where(
        is_set(x.selected), penalty, 0.0
    )


LOWEST = {"eps_clip_low": 0, "eps_clip_high": 0, "cispo_eps_clip_low": 0, "cispo_eps_clip_high": 0, "ppo_kl_coef": 0}
"""Minimum values of settings."""

ABOVE = {"clip_ratio_c": 1, "tau_pos": 0, "tau_neg": 0}
"""Exclusive lower bounds of settings."""


def find_policy_loss(name: str, options: Mapping[str, Any]) -> tuple[Loss, dict[str, float]]:
    """Return the policy loss `name` (registered, or "module:function"), and the settings that `options` have for it.

    Raises KeyError for an unknown name, and ValueError for a setting that is not a number or out of range.
    """
    found = PolicyLossRegistry.get(name)
    loss = found if isinstance(found, Loss) else make_loss(name, found, OFF_POLICY)
    knobs = pick_options(loss.function, options, name)
    for knob, value in knobs.items():
        where = f"policy_loss_type={name!r}: {knob}={value!r}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise ValueError(f"{where} must be a number of at most {LARGEST:g}; the default is {loss.knobs[knob]}")
        if value < LOWEST.get(knob, -math.inf):
            raise ValueError(f"{where} must be at least {LOWEST[knob]}; the default is {loss.knobs[knob]}")
        if value <= ABOVE.get(knob, -math.inf):
            raise ValueError(f"{where} must be above {ABOVE[knob]}; the default is {loss.knobs[knob]}")
    return loss, knobs
