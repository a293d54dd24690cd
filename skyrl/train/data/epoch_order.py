"""The order in which rows are trained on: a function of seed and epoch, and a count of the rows taken so far."""

import hashlib
from typing import TypedDict

import numpy as np

from skyrl.errors import ConfigError


class OrderState(TypedDict):
    """Where in the data a run is, and in which data. Values that JSON has."""

    taken: int
    """Rows taken since the beginning of the run."""
    rows: int
    batch_size: int
    seed: int
    fingerprint: str
    """Of the data set."""


class PromptOrder:
    """Endless epochs over a data set. Each is shuffled anew, and leaves out rows that do not fill a last batch.

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
        self.steps_per_epoch = rows // batch_size
        """Batches of `batch_size` rows in an epoch."""
        self._shuffled = (-1, np.empty(0, np.int64))

    @property
    def epoch(self) -> int:
        """Epochs that are over: every row of theirs was taken."""
        return self._state["taken"] // self._epoch_rows

    def next_batch(self, n: int) -> list[int]:
        """Take `n` rows: their indices. They may come from two epochs unless `n` divides `batch_size`."""
        first = self._state["taken"]
        self._state["taken"] += n
        return [self._row(place) for place in range(first, first + n)]

    def state(self) -> OrderState:
        """What `restore` goes on from."""
        return self._state.copy()

    def restore(self, state: OrderState) -> None:
        """Go on where the order was that gave `state`.

        Raises:
            ConfigError: It was the order of other data, of other batches, or of another seed.
        """
        names = {
            "rows": "prompts of data.train_data",
            "fingerprint": "contents of data.train_data",
            "batch_size": "trainer.train_batch_size",
            "seed": "trainer.seed",
        }
        for field, name in names.items():
            if state[field] != self._state[field]:
                raise ConfigError(
                    f"{name}: the checkpoint's is {state[field]} and this run's is {self._state[field]}, so that the "
                    "order of the data cannot be continued; use the checkpoint's, or train anew with "
                    "trainer.resume_mode=none"
                )
        self._state = state.copy()

    @property
    def _epoch_rows(self) -> int:
        return self.steps_per_epoch * self._state["batch_size"]

    def _row(self, place: int) -> int:
        epoch, index = divmod(place, self._epoch_rows)
        if self._shuffled[0] != epoch:
            self._shuffled = epoch, shuffled(self._state["rows"], self._state["seed"], epoch)
        return int(self._shuffled[1][index])


def shuffled(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The rows in the order of an epoch, [rows].

    It is sorted by hashes, so that it stays the same whatever generators a library has in a later version.
    """
    hashes = [hashlib.blake2b(f"{seed} {epoch} {row}".encode(), digest_size=16).digest() for row in range(rows)]
    return np.asarray(sorted(range(rows), key=hashes.__getitem__), np.int64)
