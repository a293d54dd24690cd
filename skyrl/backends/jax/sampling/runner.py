"""`ModelRunner` on JAX: a pool of pages and states as device arrays, and calls of compiled programs."""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl.backends.common.page_table import SCRATCH
from skyrl.backends.common.sampling.model_runner import (
    SCORED_AT_ONCE,
    TARGET_WIDTHS,
    TOP_WIDTHS,
    Drawn,
    Group,
    ModelRunner,
    PromptChunk,
    RowOptions,
    Rows,
    chunks_within,
    top_width,
)
from skyrl.backends.common.versions import VersionPool
from skyrl.backends.jax.layout import Layout
from skyrl.backends.jax.sampling.adapter_stacks import SLOTS, AdapterStacks
from skyrl.backends.jax.sampling.programs import SamplingPrograms
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.models.types import Pool

log = logging.getLogger(__name__)

ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of rows of decode programs. Those above 32 are for accelerators."""
COPIES = (1, 32)
"""Numbers of pages that one call can copy."""


def row_counts(most: int, deterministic: bool) -> tuple[int, ...]:
    """Numbers of rows for which there are programs, up to `most`."""
    return (most,) if deterministic else (*(rows for rows in ROWS if rows < most), most)


class JaxRunner(ModelRunner[Adapter]):
    """Programs for one base model, and the arrays of all pages and states.

    The arrays are allocated on first use, because writing gigabytes of zeros takes seconds.

    Args:
        graphdef: Static half of the split NNX model.
        base: Arrays of the split model, an argument of every program.
        versions: The pool whose slots are sampled from.
        zero: An adapter without effect, of the largest rank.
        model_config: Configuration of the model.
        layout: Placement of arrays.
        max_rows: Maximum sequences decoded at once.
        deterministic: If True, each adapter is decoded alone, so results do not depend on other requests.
        max_tokens: Maximum tokens of a prompt per call; 0: the default chunk sizes.
    """

    def __init__(
        self,
        graphdef: Any,
        base: Any,
        versions: VersionPool[Adapter],
        zero: Adapter,
        model_config: Any,
        layout: Layout,
        *,
        max_rows: int,
        deterministic: bool = False,
        max_tokens: int = 0,
    ):
        self._base = base
        self._zero = zero
        self._layout = layout
        self._deterministic = deterministic
        self._programs = SamplingPrograms(graphdef, model_config, base, deterministic, layout)
        self._banks = AdapterStacks(self._programs, versions, zero, apart=deterministic)
        self.vocab_size = model_config.vocab_size
        self.token_bytes = self._programs.token_bytes
        self.state_bytes = self._programs.state_bytes
        self.row_counts = row_counts(max_rows, deterministic)
        self.chunks = chunks_within(max_tokens)
        self._blocks = 0
        self._arrays: list[jax.Array] = []

    def open(self, pages: int, blocks: int, states: int) -> None:
        self._blocks = blocks
        shapes = self._programs.pool_shapes(pages, states)
        self._shapes, self._structure = jax.tree.flatten(shapes)
        self._shardings = jax.tree.leaves(self._layout.of_pool(shapes))

    @property
    def compiled(self) -> int:
        """Number of compiled programs."""
        return self._programs.compiled

    # -- the arrays of all pages and states ---------------------------------------------------------------------------

    @property
    def _pool(self) -> Pool:
        """The arrays. Programs that change them consume them and return new ones."""
        while self._make_one():
            pass
        return jax.tree.unflatten(self._structure, self._arrays)

    @_pool.setter
    def _pool(self, pool: Pool) -> None:
        self._arrays = jax.tree.leaves(pool)

    def _make_one(self) -> bool:
        """Allocate one array. Returns False if all are allocated."""
        if len(self._arrays) == len(self._shapes):
            return False
        shape, sharding = self._shapes[len(self._arrays)], self._shardings[len(self._arrays)]
        place = {"device": sharding} if self._layout.spread else {}
        self._arrays.append(jnp.zeros(shape.shape, shape.dtype, **place))
        return True

    @property
    def lost(self) -> bool:
        """True if a program consumed the arrays and did not finish, or failed while it computed them.

        A program that fails on the device has already returned arrays, which raise its error when they are read.
        """
        if any(array.is_deleted() for array in self._arrays):
            return True
        try:
            jax.block_until_ready(self._arrays)
        except Exception:  # any device error
            return True
        return False

    def clear(self) -> None:
        self._arrays = []

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        largest = COPIES[-1] if len(pairs) > 1 else COPIES[0]
        for first in range(0, len(pairs), largest):
            some = pairs[first : first + largest]
            size = next(size for size in COPIES if size >= len(some))
            arrays = np.zeros((2, size), np.int32)
            arrays[:, : len(some)] = np.asarray(some, np.int32).T
            self._pool = self._programs.copy_pages(self._pool, *arrays)
        if pairs:
            jax.block_until_ready(self._arrays)  # so that a failure is attributed to the request that copies

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:  # one by one, because each may have many megabytes
            self._pool = self._programs.copy_states(
                self._pool, np.array([source], np.int32), np.array([target], np.int32)
            )
        if pairs:
            jax.block_until_ready(self._arrays)  # as above

    # -- prompts ------------------------------------------------------------------------------------------------------

    def read(self, version: Adapter | None, pieces: Sequence[PromptChunk]) -> list[list[Any]]:
        ((table, tokens, start, state),) = pieces
        size = next(size for size in self.chunks if size >= len(tokens))
        pages, padded = np.zeros(self._blocks, np.int32), np.zeros(size, np.int32)
        pages[: len(table)] = table
        padded[: len(tokens)] = tokens
        weights = self._weights(version)
        where = np.int32(start), np.int32(len(tokens)), np.int32(state)
        self._pool, hidden = self._programs.prefill(*weights, self._pool, pages, padded, *where)
        return [jax.block_until_ready(hidden)]  # so that a failure shows before other sequences depend on the result

    def project(self, version: Adapter | None, states: Any) -> Any:
        return self._programs.project(*self._weights(version), states)

    def _weights(self, version: Adapter | None) -> tuple[Any, Adapter | None]:
        """Base weights and adapter of a version."""
        own = None if version is None else version.own_base
        return (self._base, version) if own is None else (own, None)

    def pick(self, logits: Any, ids: np.ndarray) -> np.ndarray:
        return np.asarray(self._programs.pick(logits, ids))

    def best(self, logits: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
        return jax.device_get(self._programs.best(logits, k=k))

    def alternatives(
        self, logits: Any, seed: np.ndarray, position: int, first: int, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        where = np.int32(position), np.int32(first)
        return jax.device_get(self._programs.alternatives(logits, seed, *where, np.float32(temperature)))

    # -- decoding -----------------------------------------------------------------------------------------------------

    def groups(self, slots: Sequence[int]) -> list[Group]:
        return self._banks.groups(slots)

    def forget_versions(self) -> None:
        self._banks.clear()

    def decode(self, group: Group, rows: Rows, steps: int) -> Drawn:
        base = self._base if group.handle.base is None else group.handle.base
        if rows.options is None:  # options other than penalties are data: one program for rows with and without
            rows = rows._replace(options=RowOptions.none(len(rows.tokens)))
        self._pool, drawn = self._programs.decode(base, group.handle.bank, self._pool, rows, np.int32(steps))
        return drawn

    def drawn(self, decoded: Drawn, top: bool) -> Drawn:
        if top:
            return jax.device_get(decoded)
        tokens, logprobs = jax.device_get((decoded.tokens, decoded.logprobs))
        return Drawn(tokens, logprobs, None, None)

    # -- start --------------------------------------------------------------------------------------------------------

    def warm_up(self) -> Iterator[bool]:
        """Compile the programs of sampling on the scratch page, except those for decoding with penalties.

        The first request with a penalty waits for its program. Yields, after each program, whether those of a sample of
        a short prompt are ready, which are the first.
        """
        programs, start = self._programs, time.monotonic()
        while self._make_one():
            yield False
        kinds = (1,) if self._deterministic else (1, SLOTS)
        banks = [None, *(programs.empty_bank(self._zero, slots=slots) for slots in kinds)]
        table, counts = np.full(self._blocks, SCRATCH, np.int32), self.row_counts
        blocks: list[jax.Array] = []
        assert counts is not None

        def decode(count: int, bank: Adapter | None) -> None:
            idle = Rows.idle(count, self._blocks, options=True)
            self._pool, _ = programs.decode(self._base, bank, self._pool, idle, np.int32(0))

        def prefill(chunk: int, adapter: Adapter | None) -> list[jax.Array]:
            tokens, where = np.zeros(chunk, np.int32), (np.int32(0), np.int32(chunk), np.int32(SCRATCH))
            self._pool, blocks = programs.prefill(self._base, adapter, self._pool, table, tokens, *where)
            return blocks

        for size in COPIES:
            self.copy_pages([(SCRATCH, SCRATCH)] * size)
        if self.state_bytes:
            self.copy_states([(SCRATCH, SCRATCH)])
        yield False
        for adapter, bank in zip((None, self._zero), banks, strict=False):
            blocks = prefill(self.chunks[0], adapter)
            yield False
            decode(counts[0], bank)
            yield False
        for bank in banks[1:]:
            programs.write_slot(jax.tree.map(jnp.copy, bank), np.int32(0), self._zero)
            yield True
        for adapter in (self._zero, None):
            for chunk in self.chunks[1:]:
                blocks = prefill(chunk, adapter)
                yield True
        for count in counts:
            for bank in reversed(banks):  # one row too: others of its group may be decoded apart for their options
                decode(count, bank)
                yield True
        for adapter in (self._zero, None):
            logits = programs.project(self._base, adapter, blocks[0])
            yield True
        for width in TARGET_WIDTHS:
            programs.pick(logits, np.zeros((SCORED_AT_ONCE, width), np.int32))
            yield True
        for k in {top_width(width, self.vocab_size) for width in TOP_WIDTHS}:
            programs.best(logits, k=k)
            yield True
        programs.alternatives(logits, np.zeros(2, np.uint32), np.int32(0), np.int32(0), np.float32(1))
        yield True
        log.info("all %d programs of sampling are ready, after %.1f s", self.compiled, time.monotonic() - start)
