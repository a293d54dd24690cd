"""The sequences that are being decoded, each in a row of one cache.

The cache has just the rows and the window that its sequences need (of the shapes there are), so a single short sample
does not pay for many long ones. When the need changes, the rows in use are copied to a cache of another shape.
"""

from typing import Any

import jax
import numpy as np

from skyrl.backends.jax.cache_shapes import CacheShapes
from skyrl.backends.jax.sampling_programs import HOTTEST, LARGEST_INT32, DecodeBatch, SamplingPrograms, top_width
from skyrl.backends.jax.sequences import Job, Sequence
from skyrl.tx.models.types import Adapter, KVCache


class DecodeRows:
    """Sequences in cache rows. A call that raises may leave the cache unusable (`lost`): `clear` then."""

    def __init__(self, programs: SamplingPrograms, shapes: CacheShapes, deterministic: bool):
        self._programs = programs
        self._shapes = shapes
        self._deterministic = deterministic
        self._rows: list[Sequence | None] = []
        self._cache: KVCache | None = None

    @property
    def sequences(self) -> list[Sequence]:
        """Those running, by row."""
        return [sequence for sequence in self._rows if sequence is not None]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, window) of the cache as it is."""
        if self._cache is None:
            return 0, 0
        return self._cache.keys.shape[1], self._cache.keys.shape[2]

    @property
    def lost(self) -> bool:
        """Whether a program that failed took the cache with it."""
        return self._cache is not None and any(leaf.is_deleted() for leaf in self._cache)

    def room(self, job: Job, wanted: int) -> int:
        """How many more sequences of this job, up to `wanted`, fit until all that run are at their longest."""
        running = self.sequences
        tokens = max([job.tokens, *(other.job.tokens for other in running)])
        return next((n for n in range(wanted, 0, -1) if self._shapes.fits(len(running) + n, tokens)), 0)

    def start(self, sequences: list[Sequence], prompt: KVCache) -> None:
        """Start sequences, for which there is room, each on a copy of their prompt's row."""
        self._fit(len(self.sequences) + len(sequences), sequences[0].position + 1, keep_rows=True)
        for sequence in sequences:
            row = self._rows.index(None)
            self._cache = self._programs.insert(self._cache, prompt, np.int32(row))
            self._rows[row] = sequence

    def remove(self, job: Job) -> None:
        """Free the rows of a job, and the cache if it was the last."""
        self._rows = [None if sequence and sequence.job is job else sequence for sequence in self._rows]
        if not self.sequences:
            self.clear()

    def clear(self) -> None:
        """Free all rows, and the cache."""
        self._rows, self._cache = [], None

    def step(self, base: Any, bank: Adapter, keep_rows: bool) -> list[Sequence]:
        """Append one token to every sequence; return those that ended, whose rows are free again.

        `keep_rows` says that free rows will be needed soon, so the cache should not lose them.
        """
        running = self.sequences
        self._fit(len(running), 0, keep_rows)
        one_version = not self._deterministic and len({sequence.job.slot for sequence in running}) == 1
        batch = self._batch(one_version)
        self._cache, logits = self._programs.decode(base, bank, self._cache, batch, one_version=one_version)
        k = max(sequence.job.request.topk_sample_logprobs for sequence in running)
        best = self._programs.best(logits, k=top_width(k, logits.shape[-1])) if k else None
        (tokens, logprobs), best = jax.device_get((self._programs.draw(logits, batch), best))
        ended = []
        for row, sequence in enumerate(self._rows):
            if sequence is None:
                continue
            k = sequence.job.request.topk_sample_logprobs
            top = (best[0][row, :k], best[1][row, :k]) if k else None
            if sequence.push(int(tokens[row]), float(logprobs[row]), top):
                self._rows[row] = None
                ended.append(sequence)
        if not self.sequences:
            self.clear()
        return ended

    def _batch(self, one_version: bool) -> DecodeBatch:
        batch = DecodeBatch.idle(len(self._rows))
        for row, sequence in enumerate(self._rows):
            if sequence is None:
                continue
            job, params = sequence.job, sequence.job.request.params
            batch.tokens[row], batch.positions[row] = sequence.next_input, sequence.position
            batch.slots[row], batch.seeds[row] = job.slot, job.seed
            batch.sample_index[row], batch.steps[row] = sequence.index, len(sequence.tokens)
            batch.temperature[row], batch.top_p[row] = min(params.temperature, HOTTEST), params.top_p
            batch.top_k[row] = min(max(params.top_k, 0), LARGEST_INT32)
            if one_version:
                batch.slots[:] = job.slot
        return batch

    def _fit(self, rows: int, tokens: int, keep_rows: bool) -> None:
        """Give the cache the shape for `rows` rows and for `tokens` tokens, or more where its sequences need it."""
        running = self.sequences
        tokens = max([tokens, *(sequence.position + 1 for sequence in running)])
        if keep_rows and self._shapes.fits(len(self._rows), tokens):
            rows = max(rows, len(self._rows))
        shape = self._shapes.row_count(rows), self._shapes.window(tokens)
        if shape == self.shape:
            return
        if self._cache is None:
            self._cache = self._programs.empty_cache(*shape)
        else:
            used = [row for row, sequence in enumerate(self._rows) if sequence is not None]
            order = np.zeros(shape[0], np.int32)
            order[: len(used)] = used
            self._cache = self._programs.reshape(self._cache, order, window=shape[1])
        self._rows = [*running, *[None] * (shape[0] - len(running))]
