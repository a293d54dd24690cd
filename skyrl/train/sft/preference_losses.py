"""Losses of pairs of answers, and their derivatives, for direct preference optimization.

A loss is a function of the margin of each pair. The margin is the log-ratio of policy to reference for the chosen
answer, minus that for the rejected answer. The loss depends on the two sequences only through the margin. Its gradient
is therefore the derivative with respect to the margin, times the difference of the gradients of two log-probabilities.
Single-sequence passes thus need only the derivative.

To add a loss, add a function to `PREFERENCE_LOSSES` and its name to `skyrl.config.sft.LOSS_TYPES`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Pairs = np.ndarray
"""float64 array `[pairs]`."""


class PreferenceLoss(NamedTuple):
    """A loss as a function of the margins of pairs."""

    function: Callable[[Pairs, float, float], tuple[Pairs, Pairs]]
    """Takes margins in nats, beta and label_smoothing. Returns each pair's loss, and its derivative by the margin."""
    is_per_token: bool = False
    """True if the margin is of mean log-probabilities over tokens. False if it is of sums."""


def sigmoid(margins: Pairs, beta: float, label_smoothing: float) -> tuple[Pairs, Pairs]:
    """Return the negative log-likelihood of the preferences under the Bradley-Terry model.

    Source: Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7. `label_smoothing` is the probability of
    a wrong label: Mitchell 2023, https://ericmitchell.ai/cdpo.pdf, equation 3.
    """
    right, wrong = 1 - label_smoothing, label_smoothing
    losses = -right * _log_sigmoid(beta * margins) - wrong * _log_sigmoid(-beta * margins)
    return losses, beta * (wrong * _sigmoid(beta * margins) - right * _sigmoid(-beta * margins))


def robust(margins: Pairs, beta: float, label_smoothing: float) -> tuple[Pairs, Pairs]:
    """Return an unbiased estimate of the `sigmoid` loss, for labels that are wrong with probability `label_smoothing`.

    Source: Chowdhury et al. 2024, https://arxiv.org/abs/2403.00409, equation 12.
    """
    right, wrong = (part / (1 - 2 * label_smoothing) for part in (1 - label_smoothing, label_smoothing))
    losses = -right * _log_sigmoid(beta * margins) + wrong * _log_sigmoid(-beta * margins)
    return losses, -beta * (wrong * _sigmoid(beta * margins) + right * _sigmoid(-beta * margins))


def hinge(margins: Pairs, beta: float, label_smoothing: float) -> tuple[Pairs, Pairs]:
    """Return the hinge loss. It is 0 if beta times the margin is at least 1.

    Source: Zhao et al. 2023, https://arxiv.org/abs/2305.10425.
    """
    missing = 1 - beta * margins
    return np.maximum(missing, 0.0), np.where(missing > 0, -beta, 0.0)


def ipo(margins: Pairs, beta: float, label_smoothing: float) -> tuple[Pairs, Pairs]:
    """Return the square of (margin - 1 / (2 beta)). Source: Azar et al. 2023, https://arxiv.org/abs/2310.12036."""
    distance = margins - 1 / (2 * beta)
    return distance**2, 2 * distance


PREFERENCE_LOSSES = {
    "sigmoid": PreferenceLoss(sigmoid),
    "robust": PreferenceLoss(robust),
    "hinge": PreferenceLoss(hinge),
    "ipo": PreferenceLoss(ipo, is_per_token=True),
}
"""Loss of each `loss_type`."""


def _log_sigmoid(x: Pairs) -> Pairs:
    return -np.logaddexp(0.0, -x)


def _sigmoid(x: Pairs) -> Pairs:
    return np.exp(_log_sigmoid(x))
