"""Which rows are in which step: a function of the step alone, so that a run resumes by its number of steps.

An epoch has as many rows as there are in all data sets together. Without weights each row is in it once. With weights
each data set has its share of the epoch, and goes through its own rows in an order that is drawn anew for each pass.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from skyrl.errors import ConfigError

_MIX, _ROWS = 0, 1
"""What a random stream is for."""


class Order:
    """A seeded order over the rows of several data sets, in batches. The last batch of an epoch may be short."""

    def __init__(self, sizes: Sequence[int], batch_size: int, seed: int, weights: Sequence[float] | None = None):
        """Mix data sets.

        Args:
            sizes: Rows of each data set, at least 1.
            batch_size: Rows of a step.
            seed: From 0.
            weights: Share of each data set in an epoch, up to a common factor. None: as many as it has rows.

        Raises ConfigError where the weights leave a data set no row in an epoch.
        """
        self.sizes = list(sizes)
        self.batch_size = batch_size
        self.seed = seed
        self.rows_per_epoch = sum(sizes)
        self.counts = self.sizes if weights is None else _shares(self.rows_per_epoch, weights)
        """Rows that each data set has in an epoch."""
        self._epoch = lru_cache(maxsize=1)(self._drawn_epoch)
        self._pass = lru_cache(maxsize=len(self.sizes))(self._drawn_pass)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return -(-self.rows_per_epoch // self.batch_size)

    def batch(self, step: int) -> list[tuple[int, int]]:
        """(data set, row) of each example of a step, counted from 0."""
        epoch, number = divmod(step, self.steps_per_epoch)
        start = number * self.batch_size
        mixed, draws = self._epoch(epoch)
        return [
            (int(dataset), self._row(int(dataset), epoch * self.counts[dataset] + int(draw)))
            for dataset, draw in zip(
                mixed[start : start + self.batch_size], draws[start : start + self.batch_size], strict=True
            )
        ]

    def _row(self, dataset: int, draw: int) -> int:
        """The row that the `draw`-th draw from a data set gives, counted over all epochs."""
        number, place = divmod(draw, self.sizes[dataset])
        return int(self._pass(dataset, number)[place])

    def _drawn_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The data set of each place of an epoch, and how many places before it are of the same one."""
        random = np.random.default_rng([self.seed, _MIX, epoch])
        mixed = random.permutation(np.repeat(np.arange(len(self.counts)), self.counts))
        draws = np.empty(len(mixed), np.int64)
        for dataset, count in enumerate(self.counts):
            draws[mixed == dataset] = np.arange(count)
        return mixed, draws

    def _drawn_pass(self, dataset: int, number: int) -> np.ndarray:
        return np.random.default_rng([self.seed, _ROWS, dataset, number]).permutation(self.sizes[dataset])


def _shares(rows: int, weights: Sequence[float]) -> list[int]:
    """`rows` split by weights: each share rounded down, and the rest to those with the largest remainders."""
    exact = np.asarray(weights, np.float64) / np.sum(weights) * rows
    counts = np.floor(exact).astype(np.int64)
    largest_first = np.argsort(counts - exact, kind="stable")
    counts[largest_first[: rows - int(counts.sum())]] += 1
    for dataset, count in enumerate(counts):
        if count == 0:
            raise ConfigError(
                f"train_dataset_weights[{dataset}]={weights[dataset]}: less than one of the {rows} rows of an epoch; "
                "give a larger weight, or leave out the data set"
            )
    return counts.tolist()
