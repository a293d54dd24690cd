"""A prompt that is being read into a cache row of its own, a chunk at a time.

All tokens but the last are read here; a decode step reads that one, so the first new token needs no program of its
own, and the samples of a request start as copies of one row.
"""

from typing import Any

import jax
import numpy as np

from skyrl.backends.jax.cache_shapes import SMALLEST_WINDOW, CacheShapes
from skyrl.backends.jax.sampling_programs import CHUNKS, PromptScores, SamplingPrograms
from skyrl.backends.jax.sequences import Job
from skyrl.tx.models.types import Adapter

NO_LOGPROB = -99999.0
"""Stands for the alternatives of the first prompt token, which has no distribution."""


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
        request = job.request
        k = request.topk_prompt_logprobs
        self._wants_scores = request.prompt_logprobs or k > 0
        self._k = min(1 << (k - 1).bit_length(), vocab_size) if k else 0  # a power of two, for few programs
        self._scores: list[PromptScores] = []
        if self.is_read:
            self._finish_scores()

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
        arguments = base, bank, self.cache, np.int32(self._slot), tokens, np.int32(start)
        if self._wants_scores:
            targets = np.zeros(size, np.int32)
            targets[:count] = self._tokens[start + 1 : start + 1 + count]
            self.cache, scores = self._programs.prefill_scored(*arguments, targets, k=self._k)
            self._scores.append(PromptScores(*(np.asarray(part)[:count] for part in scores)))
        else:
            self.cache = self._programs.prefill(*arguments)
        jax.block_until_ready(self.cache)  # so that a failure shows here, before other sequences depend on it
        self._read += count
        if self.is_read:
            self._finish_scores()
        return size

    def _finish_scores(self) -> None:
        """Give the job its prompt's log-probabilities, with the first token's empty entries in front."""
        if self.job.request.prompt_logprobs:
            parts = [np.asarray(scores.logprobs) for scores in self._scores]
            self.job.prompt_logprobs = np.concatenate([np.full(1, np.nan, np.float32), *parts])
        if k := self.job.request.topk_prompt_logprobs:
            ids = [np.zeros((1, k), np.int32), *(np.asarray(scores.top_ids)[:, :k] for scores in self._scores)]
            first = np.full((1, k), NO_LOGPROB, np.float32)
            logprobs = [first, *(np.asarray(scores.top_logprobs)[:, :k] for scores in self._scores)]
            self.job.topk_prompt_logprobs = np.concatenate(ids), np.concatenate(logprobs)


def chunk_size(left: int) -> int:
    """Size of the next chunk when `left` tokens remain.

    The largest is used only where more than a smallest window remains, so that chunks end inside every window.
    """
    small, middle, large = CHUNKS
    return small if left <= small else middle if left <= SMALLEST_WINDOW else large
