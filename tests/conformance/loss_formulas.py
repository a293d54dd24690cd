"""Losses of the protocol as torch formulas of log-probabilities, written from their papers, and data for them."""

from collections.abc import Callable

import numpy as np
import torch

from skyrl.types import Datum

Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Losses of one sequence's tokens, from the learner's and the sampler's log-probabilities, advantages and a mask."""


def clipped(ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return -torch.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages)


def gspo(lp: torch.Tensor, q: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mean = ((lp - q) * mask).sum() / mask.sum()
    return clipped(torch.exp(lp - lp.detach() + mean.detach()), advantages)


def stable_reinforce(lp: torch.Tensor, q: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return -torch.exp(lp - q).detach().clip(max=2.0) * lp * advantages + 0.25 * (lp - q) ** 2


FORMULAS: dict[str, Formula] = {
    "cross_entropy": lambda lp, q, a, m: -lp,
    "importance_sampling": lambda lp, q, a, m: -torch.exp(lp - q) * a,
    "ppo": lambda lp, q, a, m: clipped(torch.exp(lp - q), a),
    "cispo": lambda lp, q, a, m: -torch.exp(lp - q).clip(0.8, 1.2).detach() * lp * a,
    "dro": lambda lp, q, a, m: -(lp * a - 0.5 * 0.05 * (lp - q) ** 2),
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
}
CONFIG = {"dro": {"beta": 0.05}, "stable_reinforce": {"kl_coeff": 0.5}}
"""Settings used in the formulas."""


def datum_for(loss_fn: str, logprobs: np.ndarray, tokens: np.ndarray, seed: int) -> Datum:
    """Training data: any sequence for cross_entropy, else a sample of a policy near the learner's.

    Args:
        loss_fn: Name of a loss in `FORMULAS`.
        logprobs: The learner's log-probabilities of each token after the first.
        tokens: Tokens, one more than `logprobs`.
        seed: Seed of weights, advantages and the sampler's distance from the learner; some ratios exceed the clips.
    """
    random, count = np.random.default_rng(seed), len(tokens) - 1
    inputs = {"target_tokens": tokens[1:].astype(np.int32), "weights": random.normal(size=count).astype(np.float32)}
    if loss_fn != "cross_entropy":
        inputs["logprobs"] = (logprobs - random.normal(0, 0.3, count)).astype(np.float32)
        inputs["advantages"] = random.normal(size=count).astype(np.float32)
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = (np.arange(count) % 3 > 0).astype(np.float32)
    return Datum(tokens[:-1], inputs)


def losses_of(loss_fn: str, logprobs: torch.Tensor, datum: Datum) -> torch.Tensor:
    """The formula's losses of a datum's tokens."""
    inputs = {name: torch.tensor(value) for name, value in datum.loss_fn_inputs.items()}
    names = ("logprobs", "advantages", "sequence_ratio_mask")
    return inputs["weights"] * FORMULAS[loss_fn](logprobs, *(inputs.get(name, logprobs.detach()) for name in names))
