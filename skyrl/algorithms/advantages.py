"""Advantage estimators: convert token rewards to one advantage per token, for NumPy, torch and JAX.

An estimator gets a whole batch, because groups (all samples of one prompt) and normalization span it. It returns
advantages that are 0 outside the mask. Padding width and the order of rows do not matter.

To add an estimator, add a function here, or name your own function as "module:function". The keyword-only arguments of
the function are filled from the algorithm options with the same names.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from array_api_compat import array_namespace

from skyrl.algorithms.arrays import Mask, Tokens, is_set, select, whiten
from skyrl.algorithms.groups import Groups, Rows
from skyrl.algorithms.options import pick_options
from skyrl.utils.registry import Registry

EPSILON = 1e-6
"""Added to standard deviations and means before a division by them."""


class AdvantageInputs(NamedTuple):
    """Batch of samples, one per row. Arrays are `[batch, tokens]`; padding may be anywhere in a row."""

    rewards: Tokens
    """Reward at each token. The score of a sample is the sum of its row."""
    mask: Mask
    """Non-zero for tokens that the policy generated; zero for padding and observations between turns."""
    uids: Sequence[Hashable]
    """Prompt of each row. Rows with equal uids form a group, in any order.

    A row counts in its group even if the mask contains none of its tokens, so padding rows need separate uids.
    """
    values: Tokens | None = None
    """The critic's value before each token."""


class Advantages(NamedTuple):
    """Result of an estimator. Both arrays are `[batch, tokens]` and 0 outside the mask."""

    advantages: Tokens
    returns: Tokens
    """Targets of a critic. Equal to the advantages for estimators without a critic."""


AdvantageEstimator = Callable[..., Advantages]

AdvantageEstimatorRegistry: Registry[AdvantageEstimator] = Registry("advantage estimator")


def estimate_advantages(name: str, x: AdvantageInputs, options: Mapping[str, Any]) -> Advantages:
    """Estimate advantages with the estimator `name` (registered, or "module:function") and its settings in `options`.

    The option `advantage_batch_normalize` whitens the advantages over all tokens of the mask.

    Raises KeyError for an unknown name, and ValueError for a batch that the estimator does not support.
    """
    estimator = AdvantageEstimatorRegistry.get(name)
    if len(x.uids) != x.rewards.shape[0]:
        raise ValueError(f"{len(x.uids)} uids for {x.rewards.shape[0]} rows of rewards; give the prompt of every row")
    result = estimator(x, **pick_options(estimator, options, name))
    if options.get("advantage_batch_normalize"):
        return result._replace(advantages=whiten(result.advantages, x.mask))
    return result


@AdvantageEstimatorRegistry.register("grpo")
def grpo(x: AdvantageInputs, *, grpo_norm_by_std: bool = True) -> Advantages:
    """Estimate advantages as score minus the group's mean, divided by the group's standard deviation.

    A group of one has no baseline, so its advantage is 0. A batch of only such groups raises ValueError. Equal scores
    give exactly 0.

    Args:
        x: The batch.
        grpo_norm_by_std: True: divide by the standard deviation. False: Dr. GRPO (https://arxiv.org/abs/2503.20783).

    Source: Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2 (with the unbiased standard deviation).
    """
    rows = _Scores("grpo", x)
    if not grpo_norm_by_std:
        return _outcome(x, rows.centred)
    deviation = array_namespace(x.rewards).sqrt(rows.groups.sum(rows.centred * rows.centred) / rows.others)
    return _outcome(x, rows.centred / (deviation + EPSILON))


@AdvantageEstimatorRegistry.register("rloo")
def rloo(x: AdvantageInputs) -> Advantages:
    """Estimate advantages as score minus the mean score of the group's other samples; 0 for a group of one.

    Source: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, section 3.4.
    """
    rows = _Scores("rloo", x)
    return _outcome(x, rows.centred * rows.size / rows.others)


@AdvantageEstimatorRegistry.register("maxrl")
def maxrl(x: AdvantageInputs) -> Advantages:
    """Estimate advantages as score minus the group's mean, divided by that mean.

    The advantage is 0 for a group of one or without any success. Prompts that are solved more rarely get more weight.
    Scores are successes. A negative score raises ValueError, because a mean that is not positive would flip signs. The
    check reads the scores, so this function cannot be traced.

    Source: Tajwar et al. 2026, https://arxiv.org/abs/2602.02710.
    """
    rows = _Scores("maxrl", x)
    xp = array_namespace(x.rewards)
    if bool(xp.any(rows.scores < 0)):
        row = int(xp.argmin(rows.scores))
        raise ValueError(
            f"maxrl: row {row} scores {float(rows.scores[row])}, but its scores are successes and never negative; "
            "shift the rewards, leave KL out of them, or use grpo"
        )
    return _outcome(x, rows.centred / (rows.groups.sum(rows.scores) / rows.size + EPSILON))


@AdvantageEstimatorRegistry.register("reinforce++")
def reinforce_plus_plus(x: AdvantageInputs, *, gamma: float = 1.0) -> Advantages:
    """Estimate advantages as discounted sums of future rewards, whitened over the batch. Returns are not whitened.

    Args:
        x: The batch.
        gamma: Discount per unmasked token. A reward on a masked-out token is credited to the last unmasked token.

    Source: Hu 2025, https://arxiv.org/abs/2501.03262.
    """
    returns = _accumulated_errors(x, array_namespace(x.rewards).zeros_like(x.rewards), gamma, 1.0)
    return Advantages(whiten(returns, x.mask), returns)


@AdvantageEstimatorRegistry.register("token_rewards")
def token_rewards(x: AdvantageInputs) -> Advantages:
    """Use the reward of each token as its advantage.

    A reward on a masked-out token is credited to the last unmasked token before it. If rewards contain the KL
    divergence from a teacher (`use_kl_in_reward`, `kl_estimator_type=k1`), this is on-policy distillation. At each
    sampled token, the gradient is then that of the reverse KL of the next-token distribution.

    Source: Gu et al. 2024, https://arxiv.org/abs/2306.08543, and Agarwal et al. 2024, https://arxiv.org/abs/2306.13649.
    """
    rewards = _accumulated_errors(x, array_namespace(x.rewards).zeros_like(x.rewards), 0.0, 0.0)
    return Advantages(rewards, rewards)


@AdvantageEstimatorRegistry.register("gae")
def gae(x: AdvantageInputs, *, gamma: float = 1.0, lambd: float = 1.0) -> Advantages:
    """Estimate advantages by generalized advantage estimation (GAE) over unmasked tokens, whitened over the batch.

    The value after a token is that of the next *unmasked* token. Observations between turns and padding are skipped.
    Their rewards are credited to the last unmasked token before them. Returns are the advantages before whitening plus
    the values. Raises ValueError without values.

    Args:
        x: The batch, with `values`.
        gamma: Discount per unmasked token.
        lambd: Weight of longer estimates. 0 gives the one-step error, 1 the discounted return minus the value.

    Source: Schulman et al. 2015, https://arxiv.org/abs/1506.02438, equation 16.
    """
    if x.values is None:
        raise ValueError("advantage_estimator='gae' needs the values of a critic; set trainer.critic.model.path")
    values = select(x.mask, x.values)
    advantages = _accumulated_errors(x, values, gamma, lambd)
    return Advantages(whiten(advantages, x.mask), advantages + values)


class NothingToCompare(ValueError):
    """Raised if an estimator that compares samples of a prompt gets only one sample of each."""


class _Scores:
    """Score of each row, compared with its group."""

    def __init__(self, estimator: str, x: AdvantageInputs):
        xp = array_namespace(x.rewards)
        self.scores: Rows = xp.sum(x.rewards, axis=1)
        """Sum of each row's rewards."""
        self.groups = Groups(x.uids, self.scores)
        if self.groups.sizes.max(initial=0) < 2:
            raise NothingToCompare(
                f"{estimator}: every one of the {len(x.uids)} prompts has one sample, so no score can be compared with "
                "another; set n_samples_per_prompt to 2 or more, or use reinforce++ or gae"
            )
        self.size: Rows = self.groups.sum(xp.ones_like(self.scores))
        """Number of rows in each row's group."""
        self.others: Rows = xp.where(self.size > 1, self.size - 1, 1.0)
        """Number of other rows in each row's group. 1 for a group of one row, because it is used as a divisor."""
        # Scores are shifted before averaging, so that differences of equal scores are exactly 0.
        shifted = self.scores - self.groups.minimum(self.scores)
        self.centred: Rows = shifted - self.groups.sum(shifted) / self.size
        """Score of each row minus the mean of its group."""


def _outcome(x: AdvantageInputs, per_row: Rows) -> Advantages:
    """Return the advantage of each row, repeated at each unmasked token of the row."""
    advantages = select(x.mask, per_row[:, None] + array_namespace(per_row).zeros_like(x.rewards))
    return Advantages(advantages, advantages)


def _accumulated_errors(x: AdvantageInputs, values: Tokens, gamma: float, lambd: float) -> Tokens:
    """Return for each token the sum of (gamma lambd)^i times the one-step error of the i-th next token, 0 if masked.

    The sum starts with the token itself (i = 0). The error of a token is its reward, plus gamma times the value of the
    next unmasked token, minus the token's own value.
    """
    xp = array_namespace(x.rewards)
    mask = is_set(x.mask)
    zero = xp.zeros_like(x.rewards[:, 0])
    total, next_value, reward = zero, zero, zero
    columns = []
    for t in reversed(range(x.rewards.shape[1])):
        here, reward = mask[:, t], reward + x.rewards[:, t]
        error = reward + gamma * next_value - values[:, t]
        total = xp.where(here, error + gamma * lambd * total, total)
        next_value = xp.where(here, values[:, t], next_value)
        reward = xp.where(here, zero, reward)
        columns.append(total)
    return select(mask, xp.stack(columns[::-1], axis=1))
