"""Cuts of a training batch: into mini-batches, over ranks, into micro-batches.

One `BatchGeometry` per model serves validation, which asks for `problems`, and execution, which asks for the row
ranges. Where there are no problems, every cut below comes out even: all ranks run the same number of micro-batches of
the same size, so that collective operations meet, and no row is dropped, repeated or padded.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchGeometry:
    """The cut of one model's batch. Rows are sequences, the samples of a prompt side by side."""

    model: str
    """policy, critic, or ref, which is not trained: its mini-batch is the batch."""
    prompts: int
    """Prompts of a batch (trainer.train_batch_size)."""
    samples_per_prompt: int
    """Samples of each (generator.n_samples_per_prompt)."""
    mini_batch_prompts: int
    """Prompts of an optimizer step (trainer.<model>_mini_batch_size)."""
    ranks: int
    """Data-parallel ranks."""
    micro_batch_rows: int
    """Rows that a rank computes gradients of at once (trainer.micro_train_batch_size_per_gpu)."""
    forward_batch_rows: int
    """Rows that a rank computes log-probabilities or values of at once (trainer.micro_forward_batch_size_per_gpu)."""

    @property
    def rows(self) -> int:
        """Rows of a batch."""
        return self.prompts * self.samples_per_prompt

    def mini_batches(self) -> list[range]:
        """Rows of each optimizer step, whole prompts each."""
        return _cut(range(self.rows), self.mini_batch_prompts * self.samples_per_prompt)

    def shares(self, rows: range) -> list[range]:
        """`rows` of a batch or of a mini-batch over the ranks."""
        return _cut(rows, len(rows) // self.ranks)

    def micro_batches(self, share: range) -> list[range]:
        """A rank's share of a mini-batch, in the parts of which gradients are computed."""
        return _cut(share, self.micro_batch_rows)

    def forward_batches(self, share: range) -> list[range]:
        """A rank's share of a batch, in the parts that are scored; the last one may be shorter."""
        return _cut(share, self.forward_batch_rows)

    def problems(self) -> Iterator[str]:
        """One message per cut that does not come out even."""
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
    """The largest divisor of `total` that is at most `wanted`, or, if that is far below, one they have in common."""
    near = range(wanted, max(wanted - 10_000, 0), -1)
    return next((size for size in near if total % size == 0), math.gcd(total, wanted))
