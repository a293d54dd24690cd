"""The training sequences of one step, as arrays and as data for a backend's passes.

Arrays are `[rows, tokens]`, padded at the end. Columns are aligned with predictions. Column t refers to token t + 1 of
its row, given tokens 0 to t. A trajectory whose history was changed has several rows. Functions on whole trajectories
get these rows concatenated (`by_trajectory`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from skyrl.train.rollouts.rows import Row
from skyrl.train.rollouts.trajectory import Trajectory
from skyrl.types import Datum

Array = np.ndarray


@dataclass(frozen=True)
class Batch:
    """Rows of trajectories. Rows of the same trajectory, and of the same prompt, are adjacent."""

    rows: Sequence[Row]
    trajectories: Sequence[Trajectory]
    """Trajectories that the rows belong to. `Row.trajectory` is an index into this list."""
    uids: Sequence[str]
    """Id of the prompt of each trajectory."""
    temperature: float
    """Temperature at which the policy is trained."""

    @classmethod
    def of(
        cls, rows: Sequence[Row], trajectories: Sequence[Trajectory], uids: Sequence[str], temperature: float
    ) -> "Batch":
        """Create a batch from `rows` of `trajectories`. `uids` are the prompts of the trajectories.

        Trajectories without rows are dropped.
        """
        kept = sorted({row.trajectory for row in rows})
        numbers = {index: number for number, index in enumerate(kept)}
        return cls(
            [replace(row, trajectory=numbers[row.trajectory]) for row in rows],
            [trajectories[index] for index in kept],
            [uids[index] for index in kept],
            temperature,
        )

    @cached_property
    def lengths(self) -> Array:
        """int `[rows]`: number of columns of each row."""
        return np.array([len(tokens) - 1 for tokens in self.token_ids], np.int64)

    @cached_property
    def token_ids(self) -> list[Array]:
        """int32 `[columns + 1]` of each row."""
        return [np.asarray(row.token_ids, np.int32) for row in self.rows]

    @cached_property
    def filled(self) -> Array:
        """bool `[rows, tokens]`: True where an element is not padding."""
        return np.arange(self.lengths.max(initial=0)) < self.lengths[:, None]

    @cached_property
    def mask(self) -> Array:
        """bool `[rows, tokens]`: True for sampled tokens that are trained on."""
        return self.padded([row.mask[1:] for row in self.rows], bool)

    @cached_property
    def rewards(self) -> Array:
        """float64 `[rows, tokens]`: reward at each token."""
        return self.padded([row.rewards[1:] for row in self.rows], np.float64)

    @cached_property
    def rollout_logprobs(self) -> Array | None:
        """float64 `[rows, tokens]`: log-probabilities that the sampler returned, in nats. None if a row has none."""
        logprobs = [row.logprobs for row in self.rows]
        if any(values is None for values in logprobs):
            return None
        return self.padded([values[1:] for values in logprobs if values is not None], np.float64)

    @cached_property
    def row_uids(self) -> list[str]:
        """Id of the prompt of each row."""
        return [self.uids[row.trajectory] for row in self.rows]

    def padded(self, values: Sequence[Sequence[float] | Array], dtype: type) -> Array:
        """Combine the values of all rows into one array `[rows, tokens]`, 0 in padding."""
        return self.padded_of(np.arange(len(self.rows)), values, dtype)

    def padded_of(self, rows: Array, values: Sequence[Sequence[float] | Array], dtype: type) -> Array:
        """Combine the values of some rows into one array `[len(rows), tokens]`, 0 in padding."""
        array = np.zeros((len(rows), self.filled.shape[1]), dtype)
        if len(values):
            array[self.filled[rows]] = np.concatenate([np.asarray(row, dtype) for row in values])
        return array

    def by_trajectory(self, values: Array) -> Array:
        """Concatenate the rows of each trajectory. Returns `[trajectories, tokens]`, 0 in padding."""
        row, column = self._places
        result = np.zeros((len(self.trajectories), int(column.max(initial=-1)) + 1), values.dtype)
        result[row, column] = values[self.filled]
        return result

    def by_row(self, values: Array) -> Array:
        """Return the values `[trajectories, tokens]` as `[rows, tokens]`. Inverse of `by_trajectory`."""
        row, column = self._places
        result = np.zeros(self.filled.shape, values.dtype)
        result[self.filled] = values[row, column]
        return result

    def mini_batches(self, prompts: int) -> list[Array]:
        """Return the row indices of each optimizer step. A step has the rows of the next `prompts` prompts."""
        numbers = {uid: number // prompts for number, uid in enumerate(dict.fromkeys(self.uids))}
        of_row = np.array([numbers[uid] for uid in self.row_uids], np.int64)
        return [
            rows for mini in range(max(numbers.values(), default=-1) + 1) if len(rows := np.flatnonzero(of_row == mini))
        ]

    def data(self, rows: Array | None = None, **inputs: Array) -> list[Datum]:
        """Return rows as data for a backend. `rows` are row indices; None: all rows.

        Each of `inputs` is `[rows, tokens]`. Its name is the name of the input.
        """
        chosen = np.arange(len(self.rows)) if rows is None else rows
        inputs["temperature"] = np.full(self.filled.shape, self.temperature)
        arrays = {name: values[chosen].astype(np.float32) for name, values in inputs.items()}
        data = []
        for place, row in enumerate(chosen.tolist()):
            tokens, columns = self.token_ids[row], slice(int(self.lengths[row]))
            given = {name: array[place, columns] for name, array in arrays.items()}
            data.append(Datum(tokens[:-1], {"target_tokens": tokens[1:], **given}))
        return data

    @cached_property
    def _places(self) -> tuple[Array, Array]:
        """Trajectory of each element that is not padding, and the element's column in it. Two arrays `[elements]`."""
        starts = np.zeros(len(self.rows), np.int64)
        for index in range(1, len(self.rows)):
            if self.rows[index].trajectory == self.rows[index - 1].trajectory:
                starts[index] = starts[index - 1] + self.lengths[index - 1]
        of_row = np.array([row.trajectory for row in self.rows], np.int64)
        columns = starts[:, None] + np.arange(self.filled.shape[1])
        return np.repeat(of_row, self.lengths), columns[self.filled]
