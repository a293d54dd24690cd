"""Order of rows in training. It is a pure function of seed and position, so a run resumes from a number of rows.

Each data set is shuffled anew for each pass over its rows. An epoch mixes the data sets.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypedDict

import numpy as np

from skyrl.errors import ConfigError

SHUFFLE = "blake2b"
"""Name of the algorithm of `shuffled`. Checkpoints store it, because their positions are valid only with it."""


class EpochOrder:
    """Endless epochs over the rows of data sets.

    Args:
        sizes: Number of rows of each data set, at least 1.
        batch_size: Rows per step.
        seed: Any integer.
        weights: Relative share of each data set in an epoch. An epoch has as many rows as all data sets together. None:
            each row occurs once per epoch.
        whole_batches: If rows do not fill the last batch of an epoch, True leaves these rows out, and False makes the
            last batch shorter.

    Raises ConfigError if a data set would have no rows in an epoch because of its weight.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        batch_size: int,
        seed: int,
        weights: Sequence[float] | None = None,
        whole_batches: bool = False,
    ):
        self.sizes = list(sizes)
        self.batch_size = batch_size
        self.seed = seed
        rows = sum(sizes)
        self.counts = self.sizes if weights is None else _shares(rows, weights)
        """Number of rows of each data set in an epoch."""
        self.rows_per_epoch = rows - rows % batch_size if whole_batches else rows
        self.steps_per_epoch = -(-self.rows_per_epoch // batch_size)
        """Number of batches per epoch."""
        self._mixed = lru_cache(maxsize=1)(self._mix)
        self._pass = lru_cache(maxsize=len(self.sizes))(self._shuffle)

    def batch(self, step: int) -> list[tuple[int, int]]:
        """Return (data set, row) for each row of a step. Steps count from 0."""
        epoch, number = divmod(step, self.steps_per_epoch)
        first = epoch * self.rows_per_epoch + number * self.batch_size
        last = min(first + self.batch_size, (epoch + 1) * self.rows_per_epoch)
        return [self.row(place) for place in range(first, last)]

    def row(self, place: int) -> tuple[int, int]:
        """Return (data set, row) at a position, counted from 0 over all epochs."""
        epoch, index = divmod(place, self.rows_per_epoch)
        mixed, draws = self._mixed(epoch)
        dataset = int(mixed[index])
        number, draw = divmod(epoch * self.counts[dataset] + int(draws[index]), self.sizes[dataset])
        return dataset, int(self._pass(dataset, number)[draw])

    def _mix(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays with an entry per position of an epoch: its data set, and the number of earlier positions
        in the epoch with the same data set."""
        mixed = np.repeat(np.arange(len(self.counts)), self.counts)
        if len(self.counts) > 1:
            mixed = mixed[shuffled(len(mixed), self.seed, epoch, "mix")]
        draws = np.empty(len(mixed), np.int64)
        for dataset, count in enumerate(self.counts):
            draws[mixed == dataset] = np.arange(count)
        return mixed, draws

    def _shuffle(self, dataset: int, number: int) -> np.ndarray:
        return shuffled(self.sizes[dataset], self.seed, number, str(dataset) if dataset else "")


class OrderState(TypedDict):
    """Position of a run in its training data, and identity of the data. All values are JSON values."""

    taken: int
    """Number of rows taken since the start of the run."""
    rows: int
    batch_size: int
    seed: int
    fingerprint: str
    """Hash of the data set."""


class PromptOrder:
    """Position in the epochs of one data set. An epoch leaves out the rows that do not fill the last batch.

    Args:
        rows: Number of rows of the data set.
        batch_size: Rows per training step. The number of rows in an epoch is a multiple of it.
        seed: Seed of the order, together with the number of the epoch.
        fingerprint: Hash of the data set. A state is never restored into another data set.

    Raises:
        ConfigError: There are fewer rows than a step takes.
    """

    def __init__(self, rows: int, *, batch_size: int, seed: int, fingerprint: str = ""):
        if rows < batch_size:
            raise ConfigError(
                f"data.train_data: trainer.train_batch_size={batch_size} is more than the {rows} prompts that there "
                "are (without those that are too long); lower it, or use more data"
            )
        self._state = OrderState(taken=0, rows=rows, batch_size=batch_size, seed=seed, fingerprint=fingerprint)
        self._order = EpochOrder([rows], batch_size, seed, whole_batches=True)

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of `batch_size` rows in an epoch."""
        return self._order.steps_per_epoch

    @property
    def epoch(self) -> int:
        """Number of completed epochs. An epoch is completed when its last row has been taken."""
        return self._state["taken"] // self._order.rows_per_epoch

    def next_batch(self, n: int) -> list[int]:
        """Take the next `n` rows, and return their indices.

        The rows may span two epochs. They never do if every call takes the same `n` and `n` divides `batch_size`.
        """
        first = self._state["taken"]
        self._state["taken"] += n
        return [self._order.row(place)[1] for place in range(first, first + n)]

    def state(self) -> OrderState:
        """Return the state for `restore`."""
        return self._state.copy()

    def check(self, state: OrderState) -> None:
        """Check that `state` belongs to this order.

        Raises:
            ConfigError: The data, the batch size or the seed differ.
        """
        names = {
            "rows": "prompts of data.train_data",
            "fingerprint": "contents of data.train_data",
            "batch_size": "trainer.train_batch_size",
            "seed": "trainer.seed",
        }
        saved, mine = ({name: values[field] for field, name in names.items()} for values in (state, self._state))
        check_same_order(saved, mine, "train anew with trainer.resume_mode=none")

    def restore(self, state: OrderState) -> None:
        """Continue from `state`. Raises the errors of `check`."""
        self.check(state)
        self._state = state.copy()


def check_same_order(saved: Mapping[str, Any], mine: Mapping[str, Any], anew: str) -> None:
    """Check that a run has the same data in the same order as a checkpoint.

    Args:
        saved: Values in the checkpoint that determine the order, by the names of the user's settings.
        mine: The same values of this run.
        anew: Text for the error message that says how to start a new run.

    Raises ConfigError. It names the value that differs.
    """
    for name, value in mine.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"{name}: the checkpoint's is {saved.get(name)} and this run's is {value}, so that the order of the "
                f"data cannot be continued; use the checkpoint's, or {anew}"
            )


def shuffled(rows: int, seed: int, number: int, stream: str = "") -> np.ndarray:
    """Return the row numbers of a pass in random order, `[rows]`. The order differs by seed, number and stream.

    Rows are sorted by a hash, so the order does not depend on a library's random generator, which may change.
    """
    begin = f"{seed} {number} " if not stream else f"{seed} {stream} {number} "
    hashes = [hashlib.blake2b(f"{begin}{row}".encode(), digest_size=16).digest() for row in range(rows)]
    return np.asarray(sorted(range(rows), key=hashes.__getitem__), np.int64)


def _shares(rows: int, weights: Sequence[float]) -> list[int]:
    """Split `rows` by weights. Each share is rounded down; the shares with the largest remainders get one more row."""
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
