"""The order in which rows are trained on: a function of seed and place, so that a run resumes by a count of rows.

Each data set goes through its own rows in an order that is drawn anew for each pass. An epoch mixes data sets.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypedDict

import numpy as np

from skyrl.errors import ConfigError

SHUFFLE = "blake2b"
"""Name of `shuffled`, for checkpoints, which hold places in its orders."""


class EpochOrder:
    """Endless epochs over the rows of data sets.

    Args:
        sizes: Rows of each data set, at least 1.
        batch_size: Rows of a step.
        seed: Any integer.
        weights: Share of each data set in an epoch, which has as many rows as there are in all data sets together, up
            to a common factor. None: as many as it has rows, so that each is in it once.
        whole_batches: Whether an epoch leaves out the rows that do not fill a last batch; else that one is short.

    Raises ConfigError where the weights leave a data set no row in an epoch.
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
        """Rows that each data set has in an epoch."""
        self.rows_per_epoch = rows - rows % batch_size if whole_batches else rows
        self.steps_per_epoch = -(-self.rows_per_epoch // batch_size)
        """Batches of an epoch."""
        self._mixed = lru_cache(maxsize=1)(self._mix)
        self._pass = lru_cache(maxsize=len(self.sizes))(self._shuffle)

    def batch(self, step: int) -> list[tuple[int, int]]:
        """(data set, row) of each row of a step, counted from 0."""
        epoch, number = divmod(step, self.steps_per_epoch)
        first = epoch * self.rows_per_epoch + number * self.batch_size
        last = min(first + self.batch_size, (epoch + 1) * self.rows_per_epoch)
        return [self.row(place) for place in range(first, last)]

    def row(self, place: int) -> tuple[int, int]:
        """(data set, row) at a place, counted over all epochs from 0."""
        epoch, index = divmod(place, self.rows_per_epoch)
        mixed, draws = self._mixed(epoch)
        dataset = int(mixed[index])
        number, draw = divmod(epoch * self.counts[dataset] + int(draws[index]), self.sizes[dataset])
        return dataset, int(self._pass(dataset, number)[draw])

    def _mix(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The data set of each place of an epoch, and how many places before it are of the same one."""
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
    """Place of a run in its data, and which data. Values that JSON has."""

    taken: int
    """Rows taken since the beginning of the run."""
    rows: int
    batch_size: int
    seed: int
    fingerprint: str
    """Fingerprint of the data set."""


class PromptOrder:
    """A place in the epochs of one data set, which leave out rows that do not fill a last batch.

    Args:
        rows: Rows of the data set.
        batch_size: Rows of a training step. An epoch has a multiple of it.
        seed: With the number of the epoch it decides the order.
        fingerprint: Of the data set; a state is not restored into another one.

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
        """Batches of `batch_size` rows in an epoch."""
        return self._order.steps_per_epoch

    @property
    def epoch(self) -> int:
        """Epochs that are over: every row of theirs was taken."""
        return self._state["taken"] // self._order.rows_per_epoch

    def next_batch(self, n: int) -> list[int]:
        """Take `n` rows: their indices. They may come from two epochs unless `n` divides `batch_size`."""
        first = self._state["taken"]
        self._state["taken"] += n
        return [self._order.row(place)[1] for place in range(first, first + n)]

    def state(self) -> OrderState:
        """State that `restore` goes on from."""
        return self._state.copy()

    def check(self, state: OrderState) -> None:
        """Check that `state` is one of this order.

        Raises:
            ConfigError: It is of other data, of other batches, or of another seed.
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
        """Go on where the order was that gave `state`. Raises as `check`."""
        self.check(state)
        self._state = state.copy()


def check_same_order(saved: Mapping[str, Any], mine: Mapping[str, Any], anew: str) -> None:
    """Check that a run has the data and the order of a checkpoint's.

    Args:
        saved: What decides about those in the checkpoint, by the names that a user knows.
        mine: The same of this run.
        anew: What a user can do instead.

    Raises ConfigError, which names what differs.
    """
    for name, value in mine.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"{name}: the checkpoint's is {saved.get(name)} and this run's is {value}, so that the order of the "
                f"data cannot be continued; use the checkpoint's, or {anew}"
            )


def shuffled(rows: int, seed: int, number: int, stream: str = "") -> np.ndarray:
    """The rows in the order of a pass, [rows], in a random order of its own for each seed, number and stream.

    It is sorted by hashes, so that it stays the same whatever generators a library has in a later version.
    """
    begin = f"{seed} {number} " if not stream else f"{seed} {stream} {number} "
    hashes = [hashlib.blake2b(f"{begin}{row}".encode(), digest_size=16).digest() for row in range(rows)]
    return np.asarray(sorted(range(rows), key=hashes.__getitem__), np.int64)


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
