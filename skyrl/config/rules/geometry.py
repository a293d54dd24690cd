"""Division of a training batch into mini-batches, over ranks, and into micro-batches.

Validation calls `BatchGeometry.problems`. Execution gets ranges of rows from the other methods. Without problems, all
ranks run the same number of micro-batches of equal size, so collective operations match. No row is dropped, repeated or
padded.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchGeometry:
    """Division of one model's batch. A row is a sequence; the samples of a prompt are adjacent rows."""

    model: str
    """policy, critic or ref. The mini-batch of ref is the whole batch, because ref is not trained."""
    prompts: int
    """Number of prompts in a batch (trainer.train_batch_size)."""
    samples_per_prompt: int
    """Number of samples of each prompt (generator.n_samples_per_prompt)."""
    mini_batch_prompts: int
    """Number of prompts in an optimizer step (trainer.<model>_mini_batch_size)."""
    ranks: int
    """Number of data-parallel ranks."""
    micro_batch_rows: int
    """Number of rows in a rank's forward and backward pass (trainer.micro_train_batch_size_per_gpu)."""
    forward_batch_rows: int
    """Number of rows in a forward pass for log-probabilities or values (trainer.micro_forward_batch_size_per_gpu)."""

    @property
    def rows(self) -> int:
        """Number of rows in a batch."""
        return self.prompts * self.samples_per_prompt

    def mini_batches(self) -> list[range]:
        """Return the range of rows of each optimizer step. The samples of a prompt are in the same step."""
        return _cut(range(self.rows), self.mini_batch_prompts * self.samples_per_prompt)

    def shares(self, rows: range) -> list[range]:
        """Split `rows` (a batch or a mini-batch) over the ranks. Returns the range of each rank."""
        return _cut(rows, len(rows) // self.ranks)

    def micro_batches(self, share: range) -> list[range]:
        """Split a rank's share of a mini-batch. Returns the range of rows of each forward and backward pass."""
        return _cut(share, self.micro_batch_rows)

    def forward_batches(self, share: range) -> list[range]:
        """Split a rank's share of a batch. Returns the range of rows of each forward pass; the last may be shorter."""
        return _cut(share, self.forward_batch_rows)

    def problems(self) -> Iterator[str]:
        """Yield a message for each division that leaves a remainder."""
        field = "train_batch_size" if self.model == "ref" else f"{self.model}_mini_batch_size"
        mini = f"trainer.{field}={self.mini_batch_prompts}"
        if self.prompts % self.mini_batch_prompts:
            yield (
                f"{mini} does not divide trainer.train_batch_size={self.prompts}; use a divisor such as "
                f"{_divisor(self.prompts, self.mini_batch_prompts)}"
            )
        rows = self.mini_batch_prompts * self.samples_per_prompt
        per_prompt = f"generator.n_samples_per_prompt={self.samples_per_prompt}"
        if rows % self.ranks:
            yield (
                f"{mini} x {per_prompt} = {rows} sequences do not divide over the {self.ranks} data-parallel ranks of "
                f"the {self.model}; use a multiple of {self.ranks}, or {_divisor(rows, self.ranks)} ranks"
            )
        elif (rows // self.ranks) % self.micro_batch_rows:
            share = rows // self.ranks
            yield (
                f"trainer.micro_train_batch_size_per_gpu={self.micro_batch_rows} does not divide the {share} sequences "
                f"of a rank of the {self.model} ({mini} x {per_prompt} / {self.ranks} ranks); use a divisor such as "
                f"{_divisor(share, self.micro_batch_rows)}"
            )


def _cut(rows: range, size: int) -> list[range]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _divisor(total: int, wanted: int) -> int:
    """Return the largest divisor of `total` that is at most `wanted`.

    If that divisor is 10,000 or more below `wanted`, return the greatest common divisor of `total` and `wanted`.
    """
    near = range(wanted, max(wanted - 10_000, 0), -1)
    return next((size for size in near if total % size == 0), math.gcd(total, wanted))
