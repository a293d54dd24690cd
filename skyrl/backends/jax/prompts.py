"""A prompt that is being read into a cache row of its own, a chunk at a time.

All tokens but the last are read here; a decode step reads that one, so the first new token needs no program of its
own, and the samples of a request start as copies of one row.
"""

from typing import Any

import jax
import numpy as np

from skyrl.backends.jax.cache_shapes import SMALLEST_WINDOW, CacheShapes
from skyrl.backends.jax.prompt_scores import PromptScores
from skyrl.backends.jax.sampling_programs import CHUNKS, SamplingPrograms
from skyrl.backends.jax.sequences import Job
from skyrl.tx.models.types import Adapter


class Prompt:
    """The prompt of a job that has its slot. `cache` holds what was read of it."""

    def __init__(self, job: Job, programs: SamplingPrograms, shapes: CacheShapes, vocab_size: int):
        assert job.slot is not None
        self.job = job
        self._slot = job.slot
        self.samples_started = 0
        self._programs = programs
        self._tokens = np.asarray(job.request.prompt, np.int32)
        self._read = 0
        self.cache = programs.empty_cache(1, shapes.window(len(self._tokens)))
        self._scores = job.scores = PromptScores(job.request, job.seed, programs, vocab_size)

    @property
    def is_read(self) -> bool:
        """Whether all tokens but the last are in the cache."""
        return self._read >= len(self._tokens) - 1

    def read_chunk(self, base: Any, bank: Adapter) -> int:
        """Read the next tokens. Returns how many positions that took to compute."""
        start, left = self._read, len(self._tokens) - 1 - self._read
        size = chunk_size(left)
        count = min(size, left)
        tokens = np.zeros(size, np.int32)
        tokens[:count] = self._tokens[start : start + count]
        self.cache, hidden = self._programs.prefill(
            base, bank, self.cache, np.int32(self._slot), tokens, np.int32(start)
        )
        self._scores.read(base, bank, self._slot, hidden, start, count)
        jax.block_until_ready(self.cache)  # so that a failure shows here, before other sequences depend on it
        self._read += count
        return size


def chunk_size(left: int) -> int:
    """Size of the next chunk when `left` tokens remain.

    The largest is used only where more than a smallest window remains, so that chunks end inside every window.
    """
    small, middle, large = CHUNKS
    return small if left <= small else middle if left <= SMALLEST_WINDOW else large
