"""A prompt that is being read into pages, a chunk at a time, as far as no other has been read that begins like it.

All tokens but the last are read here; a decode step reads that one, so the first new token needs no program of its
own. Pages become part of the tree of prefixes as they fill, so that others find them while this one is still read.
"""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl.backends.common.page_table import Node, Pages
from skyrl.backends.jax.sampling.programs import CHUNKS, Pool, SamplingPrograms
from skyrl.backends.jax.sampling.prompt_logprobs import PromptScores
from skyrl.backends.jax.sampling.sequences import Job
from skyrl.tx.layers.adapter import Adapter

WORTH_WAITING = 16
"""Tokens that another prompt has to be about to read for one to wait for it."""


class Cache:
    """The arrays of all pages, and who owns which.

    The arrays are made when they are first needed: to write gigabytes of zeros takes seconds.

    Args:
        pages: Who owns which.
        programs: What reads and writes them.
        blocks: Pages of the longest sequence.
    """

    def __init__(self, pages: Pages, programs: SamplingPrograms, blocks: int):
        self.pages = pages
        self.programs = programs
        self.blocks = blocks
        self._shapes, self._structure = jax.tree.flatten(programs.pool_shapes(pages.count))
        self._arrays: list[jax.Array] = []

    @property
    def pool(self) -> Pool:
        """The arrays. A program that changes them takes these and gives others."""
        while self.make_one():
            pass
        return jax.tree.unflatten(self._structure, self._arrays)

    @pool.setter
    def pool(self, pool: Pool) -> None:
        self._arrays = jax.tree.leaves(pool)

    def make_one(self) -> bool:
        """Make one array. False if all are there."""
        if len(self._arrays) == len(self._shapes):
            return False
        shape = self._shapes[len(self._arrays)]
        self._arrays.append(jnp.zeros(shape.shape, shape.dtype))
        return True

    @property
    def lost(self) -> bool:
        """True if a program took the arrays and did not finish, or failed while it made them.

        A program that fails on the device has already given arrays, which raise its error when they are read.
        """
        if any(array.is_deleted() for array in self._arrays):
            return True
        try:
            jax.block_until_ready(self._arrays)
        except Exception:  # whatever the device says
            return True
        return False

    def clear(self) -> None:
        """Forget all pages and arrays; nobody may hold any."""
        self.pages.clear()
        self._arrays = []

    def copy(self, pairs: list[tuple[int, int]], sizes: tuple[int, ...]) -> None:
        """Copy pages (source, target)."""
        for first in range(0, len(pairs), sizes[-1]):
            some = pairs[first : first + sizes[-1]]
            size = next(size for size in sizes if size >= len(some))
            arrays = np.zeros((2, size), np.int32)
            arrays[:, : len(some)] = np.asarray(some, np.int32).T
            self.pool = self.programs.copy_pages(self.pool, *arrays)
        if pairs:
            jax.block_until_ready(self._arrays)  # so that a failure is that of the request that copies


class Prompt:
    """The prompt of a job that has its slot.

    Args:
        job: What it belongs to.
        owner: Prompts of the same owner share what they have in common.
        cache: Pages for the prompt are reserved: `pages_of` them.
        vocab_size: Tokens there are.
    """

    def __init__(self, job: Job, owner: Hashable, cache: Cache, vocab_size: int):
        self.job = job
        self.owner = owner
        self.samples_started = 0
        self._cache = cache
        self._pages = cache.pages
        self.tokens = np.asarray(job.request.prompt[:-1], np.int32)
        self.path: list[Node] = []
        """The part of the tree that is read, pinned: pages of the prompt, in order."""
        self._own: list[int] = []
        """Pages after those, which are not full yet or not part of the tree."""
        self._reserved = pages_of(job, self._pages.size)
        self._read = 0
        self._scores = job.scores = PromptScores(job.request, job.seed, cache.programs, vocab_size)
        self._reusable = min(len(self.tokens), self._scores.first_row)

    @property
    def is_read(self) -> bool:
        """Whether all tokens but the prompt's last are in the cache."""
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
            self._cache.copy([(source.page, self._own[-1])], (1,))
        finally:
            self._pages.unpin(source)
        self._read += count
        self._keep_full()

    def read_chunk(self, base: Any, adapter: Adapter | None) -> int:
        """Read the next tokens. Returns how many positions that took to compute."""
        start, left = self._read, len(self.tokens) - self._read
        size = next((size for size in CHUNKS if size >= left), CHUNKS[-1])
        count = min(size, left)
        while len(self.table) * self._pages.size < start + count:
            self._own.append(self._take())
        table = np.zeros(self._cache.blocks, np.int32)
        table[: len(self.table)] = self.table
        tokens = np.zeros(size, np.int32)
        tokens[:count] = self.tokens[start : start + count]
        programs = self._cache.programs
        self._cache.pool, hidden = programs.prefill(base, adapter, self._cache.pool, table, tokens, np.int32(start))
        self._scores.read(base, adapter, hidden, start, count)
        jax.block_until_ready(hidden)  # so that a failure shows here, before other sequences depend on it
        self._read += count
        self._keep_full()
        return size

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


def pages_of(job: Job, size: int) -> int:
    """Pages that reading a job's prompt takes."""
    return -(-(len(job.request.prompt) - 1) // size)


def pages_per_sample(job: Job, size: int) -> int:
    """Pages of its own that each sample of a job takes: from the page with the prompt's last token to its own last."""
    read = len(job.request.prompt) - 1
    return -(-(read + job.max_tokens) // size) - read // size
