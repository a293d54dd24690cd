"""Selection of tokens for the policy losses `clip_cov` and `kl_cov`, once per mini-batch.

The covariance of a token is (advantage - mean) x (log-probability - mean). Means are over all unmasked tokens of the
mini-batch. The advantages are the estimator's; reductions affect token weights only. The selection is stored in
`LossInputs.selected`. The losses then act on single tokens, so the split into micro-batches does not matter. The
log-probabilities come from a forward pass of the learner over the whole mini-batch. Without such a pass, these losses
cannot be used.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from skyrl.algorithms.arrays import ROUNDING, Mask, Tokens, place, to_numpy
from skyrl.algorithms.options import pick_options

TIED = 1e-4
"""Tolerance of a log-probability in nats, well above rounding errors.

Covariances are equal if they differ by at most this tolerance times the largest centred advantage.
"""


def select_tokens(
    options: Mapping[str, Any],
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    generator: np.random.Generator,
) -> Tokens | None:
    """Select tokens for the policy loss in `options` (`trainer.algorithm` as a mapping).

    Returns None for a loss that does not select tokens. The other arguments are those of `clip_cov_tokens`.
    """
    name = options["policy_loss_type"]
    if name == "clip_cov":
        settings = pick_options(clip_cov_tokens, options, name)
        return clip_cov_tokens(logprobs, old_logprobs, advantages, mask, generator, **settings)
    if name == "kl_cov":
        return kl_cov_tokens(logprobs, advantages, mask, **pick_options(kl_cov_tokens, options, name))
    return None


def clip_cov_tokens(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    generator: np.random.Generator,
    *,
    clip_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    eps_clip_low: float = 0.2,
    eps_clip_high: float = 0.2,
) -> Tokens:
    """Return 1.0 at tokens that lose their gradient, 0.0 elsewhere, `[batch, tokens]`.

    Candidates are tokens whose covariance lies strictly between the bounds and whose ratio is not clipped. The draw
    depends on the generator and the tokens, but not on padding or the order of rows.

    Args:
        logprobs: The learner's log-probabilities before the update on this mini-batch, in nats.
        old_logprobs: Log-probabilities at the start of the step.
        advantages: The estimator's advantages.
        mask: Loss mask, non-zero for tokens that count.
        generator: Random generator of the draw. For reproducible draws, derive its seed from run and mini-batch.
        clip_ratio: Number of drawn tokens as a fraction of all unmasked tokens. At least one candidate is drawn.
        clip_cov_lb: Lower bound of the covariance.
        clip_cov_ub: Upper bound of the covariance.
        eps_clip_low: Lower clip epsilon of the policy loss.
        eps_clip_high: Upper clip epsilon of the policy loss.

    Source: Cui et al. 2025, https://arxiv.org/abs/2505.22617.
    """
    counted, values = to_numpy(mask) != 0, to_numpy(advantages)
    log_ratio = np.where(counted, to_numpy(logprobs) - to_numpy(old_logprobs), 0)
    clipped = ((values > 0) & (log_ratio > np.log1p(eps_clip_high) + ROUNDING)) | (
        (values < 0) & (log_ratio < np.log1p(-eps_clip_low) - ROUNDING if eps_clip_low < 1 else False)
    )
    covariance, noise = _covariance(logprobs, advantages, counted)
    candidates = np.flatnonzero(counted & ~clipped & (clip_cov_lb < covariance) & (covariance < clip_cov_ub))
    # Sort by covariance, so that a draw selects the same tokens in any order of rows. Tokens whose covariances are
    # equal up to rounding stay in the order of the batch.
    candidates = candidates[np.argsort(covariance.ravel()[candidates], kind="stable")]
    steps = np.diff(covariance.ravel()[candidates], prepend=-np.inf) > noise
    candidates = candidates[np.lexsort((candidates, np.cumsum(steps)))]
    wanted = min(max(int(clip_ratio * counted.sum()), 1), len(candidates))
    return _marks(generator.permutation(candidates)[:wanted], logprobs)


def kl_cov_tokens(logprobs: Tokens, advantages: Tokens, mask: Mask, *, kl_cov_frac: float = 0.2) -> Tokens:
    """Return 1.0 at tokens that get the KL penalty, 0.0 elsewhere, `[batch, tokens]`.

    These are the tokens with the highest covariance. Tokens whose covariance equals the lowest selected one up to
    rounding are selected too, so rounding has no effect.

    Args:
        logprobs: The learner's log-probabilities before the update on this mini-batch, in nats.
        advantages: The estimator's advantages.
        mask: Loss mask, non-zero for tokens that count.
        kl_cov_frac: Fraction of the tokens to select, at least one token.

    Source: Cui et al. 2025, https://arxiv.org/abs/2505.22617.
    """
    counted = to_numpy(mask) != 0
    covariance, noise = _covariance(logprobs, advantages, counted)
    descending = np.sort(covariance[counted])[::-1]
    last = descending[max(int(kl_cov_frac * len(descending)), 1) - 1] if len(descending) else 0.0
    return _marks(np.flatnonzero(counted & (covariance >= last - noise)), logprobs)


def _covariance(logprobs: Tokens, advantages: Tokens, counted: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the covariance of each token (0 outside the mask), and the tolerance for equal covariances."""
    centred = []
    for values in (to_numpy(advantages), to_numpy(logprobs)):
        mean = values[counted].mean() if counted.any() else 0.0
        centred.append(np.where(counted, values - mean, 0.0))
    noise = TIED * np.abs(centred[0]).max(initial=0.0)
    return centred[0] * centred[1], noise or TIED


def _marks(tokens: np.ndarray, like: Tokens) -> Tokens:
    """Return 1.0 at the tokens with these flat indices, as an array like `like`."""
    marks = np.zeros(int(np.prod(like.shape)))
    marks[tokens] = 1
    return place(marks.reshape(like.shape), like, dtype=like.dtype)
