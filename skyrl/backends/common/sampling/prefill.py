"""A prompt that is being read into pages, a chunk at a time, as far as no other has been read that begins like it.

All tokens but the last are read here; a decode step reads that one, so the first new token needs no program of its
own. Pages become part of the tree of prefixes as they fill, so that others find them while this one is still read.
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
"""Tokens that another prompt has to be about to read for one to wait for it."""


class Prompt:
    """The prompt of a job that has its slot.

    Args:
        job: What it belongs to.
        owner: Prompts of the same owner share what they have in common.
        pages: Of the cache. Those for the prompt are reserved: `pages_of` them.
        runner: What reads them.
    """

    def __init__(self, job: Job, owner: Hashable, pages: Pages, runner: ModelRunner[Any]):
        self.job = job
        self.owner = owner
        self.samples_started = 0
        self.state = SCRATCH
        """Slot of its state, which is that after the tokens that are read."""
        self._pages = pages
        self._runner = runner
        self.tokens = np.asarray(job.request.prompt[:-1], np.int32)
        self.path: list[Node] = []
        """The part of the tree that is read, pinned: pages of the prompt, in order."""
        self._own: list[int] = []
        """Pages after those, which are not full yet or not part of the tree."""
        self._reserved = pages_of(job, self._pages.size)
        self._read = 0
        self._scores = job.scores = PromptScores(job.request, job.seed, runner)
        self._reusable = min(len(self.tokens), self._scores.first_row)

    @property
    def is_read(self) -> bool:
        """True if all tokens but the prompt's last are in the cache."""
        return self._read >= len(self.tokens)

    @property
    def table(self) -> list[int]:
        """Its pages so far."""
        return [node.page for node in self.path] + self._own

    def waits_for(self, earlier: "Prompt", common: int) -> bool:
        """True if an earlier prompt that shares so many tokens is about to prefill much of what this one needs next."""
        if earlier.is_read:
            return False
        shared = min(common, self._reusable)
        size = self._pages.size
        there = min(-(-shared // size) * size, len(earlier.tokens))  # others find a page when it is full
        return shared - self._read >= WORTH_WAITING and earlier._read < there

    def find_read(self) -> None:
        """Take over what others have read of the tokens that are next."""
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
        """Begin the next page as a copy of one that begins alike."""
        found = self._pages.longest(node, wanted)
        if found is None or not self._pages.can_pin(found[0]):
            return
        source, count = found
        self._pages.pin(source)  # so that taking a page does not take this one
        try:
            self._own.append(self._take())
            self._runner.copy_pages([(source.page, self._own[-1])])
        finally:
            self._pages.unpin(source)
        self._read += count
        self._keep_full()

    @property
    def next_size(self) -> int:
        """Positions that it takes to compute to read the next tokens."""
        left, chunks = len(self.tokens) - self._read, self._runner.chunks
        if self._runner.reads_together:
            return min(left, chunks[-1])
        return next((size for size in chunks if size >= left), chunks[-1])

    def next_piece(self) -> PromptChunk:
        """The next tokens, with pages for them."""
        start = self._read
        tokens = self.tokens[start : start + self.next_size]
        while len(self.table) * self._pages.size < start + len(tokens):
            self._own.append(self._take())
        return PromptChunk(self.table, tokens, start, self.state)

    def end_piece(self, version: Any, piece: PromptChunk, hidden: list[States]) -> None:
        """Score a piece that a version's weights have read, and keep its pages."""
        count = len(piece.tokens)
        self._scores.read(version, hidden, piece.start, count)
        self._read += count
        self._keep_full()

    def _keep_full(self) -> None:
        """Hand full pages over to the tree, and the last one when all is read."""
        size = self._pages.size
        while self._own:
            first = len(self.path) * size
            tokens = self.tokens[first : min(first + size, self._read)]
            if not len(tokens) or (len(tokens) < size and not self.is_read):
                return
            parent = self.path[-1] if self.path else self._pages.root(self.owner)
            self.path.append(self._pages.insert(parent, tokens, self._own.pop(0)))

    def release(self) -> None:
        """Give up everything."""
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
    """Read a piece of each prompt with a version's weights, or all that is left of them.

    Returns the positions that this took to compute, and the prompts that failed.
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
    """Read the next piece of each prompt in one call. Returns those that failed.

    If a call for several fails, they are read one by one, so that none fails for another. Raises `BackendLost`.
    """
    failed: dict[Prompt, Exception] = {}
    try:
        pieces = [prompt.next_piece() for prompt in prompts]
        states = runner.read(version, pieces)
    except BackendLost:  # which no prompt is to blame for
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
    """Pages that reading a job's prompt takes."""
    return -(-(len(job.request.prompt) - 1) // size)


def pages_per_sample(job: Job, size: int) -> int:
    """Pages of its own that each sample of a job takes: from the page with the prompt's last token to its own last."""
    read = len(job.request.prompt) - 1
    return -(-(read + job.max_tokens) // size) - read // size
