"""Chunked prefill of a prompt into cache pages. If other prompts have the same prefix, their pages are reused.

Prefill reads all tokens except the last one, which the first decode step reads. The first new token therefore needs no
separate program. Full pages enter the prefix tree immediately, so other prompts can use them while this prompt is still
being read.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from skyrl.backends.common.page_table import SCRATCH, Node, Pages
from skyrl.backends.common.sampling.model_runner import ModelRunner, PromptChunk, States
from skyrl.backends.common.sampling.prompt_logprobs import PromptScores
from skyrl.backends.common.sampling.sequences import Job
from skyrl.errors import BackendLost

WORTH_WAITING = 16
"""Minimum number of shared tokens that make a prompt wait for another prompt to read them."""


class Prompt:
    """The prompt of a job whose version has a slot.

    Args:
        job: Job of the prompt.
        owner: Prompts of the same owner share prefixes.
        pages: Allocator of the cache's pages, in which `pages_of` pages are reserved for this prompt.
        runner: Runner that reads the prompt.
    """

    def __init__(self, job: Job, owner: Hashable, pages: Pages, runner: ModelRunner[Any]):
        self.job = job
        self.owner = owner
        self.samples_started = 0
        self.state = SCRATCH
        """Slot of the recurrent state after the tokens that were read."""
        self._pages = pages
        self._runner = runner
        self.tokens = np.asarray(job.request.prompt[:-1], np.int32)
        self.path: list[Node] = []
        """Pages of the prompt in the prefix tree, in order, pinned."""
        self._own: list[int] = []
        """Pages after `path` that are not full yet or not in the tree."""
        self._reserved = pages_of(job, self._pages.size)
        self._read = 0
        self._scores = job.scores = PromptScores(job.request, job.seed, runner)
        self._reusable = min(len(self.tokens), self._scores.first_row)

    @property
    def is_read(self) -> bool:
        """True if all tokens except the prompt's last are in the cache."""
        return self._read >= len(self.tokens)

    @property
    def table(self) -> list[int]:
        """Pages of the prompt so far."""
        return [node.page for node in self.path] + self._own

    def waits_for(self, earlier: "Prompt", common: int) -> bool:
        """Return True if `earlier`, which shares `common` first tokens, is about to read tokens needed next."""
        if earlier.is_read:
            return False
        shared = min(common, self._reusable)
        size = self._pages.size
        there = min(-(-shared // size) * size, len(earlier.tokens))  # only full pages are shared
        return shared - self._read >= WORTH_WAITING and earlier._read < there

    def find_read(self) -> None:
        """Take over pages that other prompts have read."""
        size, before = self._pages.size, self._read
        node = self.path[-1] if self.path else self._pages.root(self.owner)
        while not self._own and self._read < self._reusable:
            wanted = self.tokens[self._read : min(self._read + size, self._reusable)]
            following = self._pages.next_full(node, wanted)
            if following is None:
                self._copy_longest(node, wanted)
                break
            self._pages.pin(following)
            self._drop_reservation()
            self.path.append(following)
            node = following
            self._read += size
        self.job.cache_hits += self._read - before

    def _copy_longest(self, node: Node, wanted: np.ndarray) -> None:
        """Copy the cached page with the longest common prefix as the start of the next page."""
        found = self._pages.longest(node, wanted)
        if found is None or not self._pages.can_pin(found[0]):
            return
        source, count = found
        self._pages.pin(source)  # so that it is not evicted when a page is taken
        try:
            self._own.append(self._take())
            self._runner.copy_pages([(source.page, self._own[-1])])
        finally:
            self._pages.unpin(source)
        self._read += count
        self._keep_full()

    @property
    def next_size(self) -> int:
        """Number of positions to compute for the next chunk."""
        left, chunks = len(self.tokens) - self._read, self._runner.chunks
        if self._runner.reads_together:
            return min(left, chunks[-1])
        return next((size for size in chunks if size >= left), chunks[-1])

    def next_piece(self) -> PromptChunk:
        """Return the next chunk, with pages for it."""
        start = self._read
        tokens = self.tokens[start : start + self.next_size]
        while len(self.table) * self._pages.size < start + len(tokens):
            self._own.append(self._take())
        return PromptChunk(self.table, tokens, start, self.state)

    def end_piece(self, version: Any, piece: PromptChunk, hidden: list[States]) -> None:
        """Score a chunk that was read with the weights of a version, and keep its pages."""
        count = len(piece.tokens)
        self._scores.read(version, hidden, piece.start, count)
        self._read += count
        self._keep_full()

    def _keep_full(self) -> None:
        """Add full pages to the prefix tree; the last page too when the prompt is read."""
        size = self._pages.size
        while self._own:
            first = len(self.path) * size
            tokens = self.tokens[first : min(first + size, self._read)]
            if not len(tokens) or (len(tokens) < size and not self.is_read):
                return
            parent = self.path[-1] if self.path else self._pages.root(self.owner)
            self.path.append(self._pages.insert(parent, tokens, self._own.pop(0)))

    def release(self) -> None:
        """Release all pages."""
        for node in reversed(self.path):
            self._pages.unpin(node)
        for page in self._own:
            self._pages.give_back(page)
        self._pages.unreserve(self._reserved)
        self.path, self._own, self._reserved = [], [], 0

    def _take(self) -> int:
        self._reserved -= 1
        return self._pages.take()

    def _drop_reservation(self) -> None:
        self._reserved -= 1
        self._pages.unreserve(1)


def read_next(
    runner: ModelRunner[Any], version: Any, prompts: Sequence[Prompt], in_parts: bool
) -> tuple[int, dict[Prompt, Exception]]:
    """Read the next chunk of each prompt (without `in_parts`: all chunks) with the weights of a version.

    Returns the number of positions computed, and the prompts that failed.
    """
    failed: dict[Prompt, Exception] = {}
    for prompt in prompts:
        try:
            prompt.find_read()
        except Exception as error:
            failed[prompt] = error
    size = 0
    while left := [prompt for prompt in prompts if not (prompt.is_read or prompt in failed)]:
        size += sum(prompt.next_size for prompt in left)
        failed |= _read_pieces(runner, version, left)
        if in_parts:
            break
    return size, failed


def _read_pieces(runner: ModelRunner[Any], version: Any, prompts: Sequence[Prompt]) -> dict[Prompt, Exception]:
    """Read the next chunk of each prompt in one call. Returns the prompts that failed.

    If a call for several prompts fails, each is read separately, so that a prompt fails only by its own error. Raises
    `BackendLost`.
    """
    failed: dict[Prompt, Exception] = {}
    try:
        pieces = [prompt.next_piece() for prompt in prompts]
        states = runner.read(version, pieces)
    except BackendLost:  # not caused by a prompt
        raise
    except Exception as error:
        if len(prompts) == 1:
            return {prompts[0]: error}
        for prompt in prompts:
            failed |= _read_pieces(runner, version, [prompt])
        return failed
    for prompt, piece, hidden in zip(prompts, pieces, states, strict=True):
        try:
            prompt.end_piece(version, piece, hidden)
        except BackendLost:
            raise
        except Exception as error:
            failed[prompt] = error
    return failed


def pages_of(job: Job, size: int) -> int:
    """Number of pages that the prefill of a job's prompt needs."""
    return -(-(len(job.request.prompt) - 1) // size)


def pages_per_sample(job: Job, size: int) -> int:
    """Number of further pages that each sample of a job needs, from the page of the prompt's last token on."""
    read = len(job.request.prompt) - 1
    return -(-(read + job.max_tokens) // size) - read // size
