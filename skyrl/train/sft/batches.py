"""Examples as what a learner is given. The loss `cross_entropy` is a sum, so the weights make it a mean."""

from collections.abc import Sequence

import numpy as np

from skyrl.train.sft.examples import Example
from skyrl.types import Datum


def training_data(examples: Sequence[Example]) -> list[Datum]:
    """A whole batch, whose loss is the mean over all its trained tokens, however it is cut for computing.

    Weights are 1 / (trained tokens of the batch) where a token is trained on, and 0 elsewhere.
    """
    scale = 1.0 / sum(example.trained_tokens for example in examples)
    return weighted_data(examples, [scale] * len(examples))


def scoring_data(examples: Sequence[Example]) -> list[Datum]:
    """Examples whose loss is the sum over their trained tokens."""
    return weighted_data(examples, [1.0] * len(examples))


def weighted_data(examples: Sequence[Example], weights: Sequence[float]) -> list[Datum]:
    """Examples whose loss is the sum over their trained tokens, each example's times its weight, of any sign."""
    return [_datum(example, weight) for example, weight in zip(examples, weights, strict=True)]


def _datum(example: Example, weight: float) -> Datum:
    """Each token predicts the next one."""
    return Datum(
        example.token_ids[:-1],
        {
            "target_tokens": example.token_ids[1:].astype(np.int64),
            "weights": example.mask[1:].astype(np.float32) * np.float32(weight),
        },
    )
