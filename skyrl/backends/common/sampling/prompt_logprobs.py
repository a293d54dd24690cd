"""Prompt scores of a request: log-probabilities of given tokens, the most likely tokens, and drawn alternatives.

Row i describes prompt token i + 1, whose distribution is computed from the hidden state of token i. Logits over the
vocabulary exist for one block of rows at a time. They are computed once for all options, and only for rows that an
option needs.
"""

from typing import Any

import numpy as np

from skyrl.backends.common.sampling.model_runner import (
    DRAWS_AT_ONCE,
    HOTTEST,
    SCORED_AT_ONCE,
    TARGET_WIDTHS,
    Logits,
    ModelRunner,
    States,
    top_width,
)
from skyrl.backends.operations import Sample
from skyrl.types import TokenMatrix, TokenTable

NO_LOGPROB = -99999.0
"""Log-probability in `topk_prompt_logprobs` of a prompt token without a score, such as the first token, which has no
distribution."""


class PromptScores:
    """Scores of one request, filled chunk by chunk. The public attributes are named as in `SampleOutput`.

    Args:
        request: Request with the options.
        seed: Seed as returned by `seed_words`.
        runner: Runner of the sampler.
    """

    def __init__(self, request: Sample, seed: tuple[int, int], runner: ModelRunner[Any]):
        rows, k, draws = len(request.prompt) - 1, request.topk_prompt_logprobs, request.prompt_alt_tokens_k
        self._request = request
        self._seed = np.asarray(seed, np.uint32)
        self._runner = runner
        self._top_width = top_width(k, runner.vocab_size)
        self._first = max(0, rows - (request.prompt_logprobs_last_n or rows))
        """First scored row of `prompt_logprobs` and `topk_prompt_logprobs`."""
        self.prompt_logprobs = np.full(rows + 1, np.nan, np.float32) if request.prompt_logprobs else None
        self.topk_prompt_logprobs = _table(rows + 1, k, NO_LOGPROB) if k else None
        self.prompt_alt_tokens = _table(rows, draws, 0.0) if draws else None
        targets = request.target_prompt_logprobs
        self._targets = None if targets is None else _Targets(targets)

    @property
    def target_prompt_logprobs(self) -> TokenMatrix | None:
        return self._targets.logprobs if self._targets else None

    @property
    def first_row(self) -> int:
        """First row that any option needs; hidden states of earlier tokens are not needed."""
        first = len(self._request.prompt)
        if self.prompt_logprobs is not None or self.topk_prompt_logprobs is not None:
            first = self._first
        if self._targets is not None:
            first = min(first, self._targets.first_row)
        return 0 if self.prompt_alt_tokens is not None else first

    def read(self, version: Any, hidden: list[States], start: int, count: int) -> None:
        """Score `count` rows from row `start` on. `hidden` has their hidden states in blocks of `SCORED_AT_ONCE`."""
        for states, offset in zip(hidden, range(0, count, SCORED_AT_ONCE), strict=False):
            block = slice(start + offset, start + min(count, offset + SCORED_AT_ONCE))
            suffix = (self.prompt_logprobs is not None or self.topk_prompt_logprobs is not None) and (
                block.stop > self._first
            )
            targets = self._targets is not None and self._targets.has(block)
            if not (suffix or targets or self.prompt_alt_tokens is not None):
                continue
            logits = self._runner.project(version, states)
            if suffix:
                self._score_suffix(logits, block)
            if self._targets is not None and targets:
                self._targets.score(self._runner, logits, block)
            if self.prompt_alt_tokens is not None:
                self._draw(logits, block, self.prompt_alt_tokens)

    def _score_suffix(self, logits: Logits, block: slice) -> None:
        rows = slice(max(block.start, self._first), block.stop)
        inside, tokens = slice(rows.start - block.start, rows.stop - block.start), slice(rows.start + 1, rows.stop + 1)
        if self.prompt_logprobs is not None:
            ids = np.zeros((SCORED_AT_ONCE, 1), np.int32)
            ids[inside, 0] = self._request.prompt[tokens]
            self.prompt_logprobs[tokens] = self._runner.pick(logits, ids)[inside, 0]
        if self.topk_prompt_logprobs is not None:
            best = self._runner.best(logits, self._top_width)
            for column, values in zip(self.topk_prompt_logprobs, best, strict=True):
                column[tokens] = values[inside, : column.shape[1]]

    def _draw(self, logits: Logits, block: slice, table: TokenTable) -> None:
        temperature, k = min(self._request.params.temperature, HOTTEST), table[0].shape[1]
        for first in range(0, k, DRAWS_AT_ONCE):
            drawn = self._runner.alternatives(logits, self._seed, block.start, first, temperature)
            for column, values in zip(table, drawn, strict=True):
                column[block, first : first + DRAWS_AT_ONCE] = values[: block.stop - block.start, : k - first]


class _Targets:
    """Cells of a request's `target_prompt_logprobs` that contain a token, by row."""

    def __init__(self, targets: TokenMatrix):
        self._ids = targets.values
        self._wanted = np.flatnonzero(targets.values >= 0)
        self._rows = targets.rows[self._wanted]
        logprobs = np.zeros(targets.values.shape, np.float32)
        self.logprobs = TokenMatrix(logprobs, targets.shape, targets.crow_indices, targets.col_indices)

    @property
    def first_row(self) -> int:
        return int(self._rows[0]) if len(self._rows) else np.iinfo(np.int32).max

    def has(self, block: slice) -> bool:
        first, last = self._span(block)
        return first < last

    def score(self, runner: ModelRunner[Any], logits: Logits, block: slice) -> None:
        """Fill in the cells of a block, in groups of at most the largest supported width per row."""
        first, last = self._span(block)
        cells, rows = self._wanted[first:last], self._rows[first:last] - block.start
        columns = np.arange(len(rows)) - np.searchsorted(rows, rows)
        for left in range(0, int(columns.max()) + 1, TARGET_WIDTHS[-1]):
            here = (columns >= left) & (columns < left + TARGET_WIDTHS[-1])
            index = rows[here], columns[here] - left
            width = next(width for width in TARGET_WIDTHS if width > index[1].max())
            ids = np.zeros((SCORED_AT_ONCE, width), np.int32)
            ids[index] = self._ids[cells[here]]
            self.logprobs.values[cells[here]] = runner.pick(logits, ids)[index]

    def _span(self, block: slice) -> tuple[int, int]:
        first, last = np.searchsorted(self._rows, [block.start, block.stop])
        return int(first), int(last)


def _table(rows: int, k: int, empty: float) -> TokenTable:
    return np.zeros((rows, k), np.int32), np.full((rows, k), empty, np.float32)
