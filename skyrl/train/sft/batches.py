"""Conversion of examples to `Datum`s for a learner.

The loss `cross_entropy` is a weighted sum over tokens. The weights can turn it into a mean.
"""

from collections.abc import Sequence

import numpy as np

from skyrl.train.sft.examples import Example
from skyrl.types import Datum


def training_data(examples: Sequence[Example]) -> list[Datum]:
    """Convert a batch so that its loss is the mean over all its trained tokens, even if it is split into micro-batches.

    Trained tokens have weight 1 / (number of trained tokens in the batch). All other tokens have weight 0.
    """
    scale = 1.0 / sum(example.trained_tokens for example in examples)
    return weighted_data(examples, [scale] * len(examples))


def scoring_data(examples: Sequence[Example]) -> list[Datum]:
    """Convert examples so that their loss is the sum over their trained tokens."""
    return weighted_data(examples, [1.0] * len(examples))


def weighted_data(examples: Sequence[Example], weights: Sequence[float]) -> list[Datum]:
    """Convert examples. The loss is the sum over trained tokens, each times the weight (any sign) of its example."""
    return [_datum(example, weight) for example, weight in zip(examples, weights, strict=True)]


def _datum(example: Example, weight: float) -> Datum:
    """Convert an example. The target of each token is the next token."""
    return Datum(
        example.token_ids[:-1],
        {
            "target_tokens": example.token_ids[1:].astype(np.int64),
            "weights": example.mask[1:].astype(np.float32) * np.float32(weight),
        },
    )
