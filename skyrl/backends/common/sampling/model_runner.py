"""Computation of a sampler: prompts read into pages, tokens drawn, tokens scored.

Admission, pages, prefixes, stops and turns are the sampler's; a runner does what it is told, for any versions, which
are handles that the sampler passes on and never looks into.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from skyrl.backends.common.page_table import PAGE_SIZE, SCRATCH

Version = TypeVar("Version")
States = Any
"""Hidden states of up to `SCORED_AT_ONCE` tokens of a prompt."""
Logits = Any
"""Logits of those."""

CHUNKS = (32, 64, 256)
"""Tokens of a prompt read at once."""

BURST = 8
"""Tokens that a decode call generates at most."""

STOP_IDS = 8
"""Stop tokens that end a row inside a decode call; the host looks for all."""

SCORED_AT_ONCE = 32
"""Prompt tokens whose logits over the whole vocabulary exist at the same time. Divides every chunk."""

TOP_WIDTHS = (8, 64)
"""Most likely tokens that are found at once: the lattice of every top-k option."""

TARGET_WIDTHS = (1, 8, 64, 512)
"""Named tokens per row that are scored at once; the tokens that follow are one each, and more take several calls."""

DRAWS_AT_ONCE = 8
"""Alternatives per prompt token that are drawn by one call."""

LARGEST_INT32 = 2**31 - 1
HOTTEST = 1e30
"""Temperatures above are the same uniform distribution, and do not fit into float32."""


def chunks_within(tokens: int) -> tuple[int, ...]:
    """Those of `CHUNKS` that a call of so many tokens at most may have; 0: all."""
    return tuple(size for size in CHUNKS if size <= tokens) if tokens else CHUNKS


def check_call_tokens(tokens: int, rows: int) -> None:
    """Raise `ValueError` if calls of so many tokens (0: any) cannot read a prompt, or not a token of so many rows."""
    if 0 < tokens < CHUNKS[0]:
        raise ValueError(f"sample_max_num_batched_tokens={tokens} is below {CHUNKS[0]}; use more, or 0")
    if 0 < tokens < rows:
        raise ValueError(
            f"sample_max_num_sequences={rows} is above sample_max_num_batched_tokens={tokens}, and each sequence has a "
            "token in a call; lower it, or raise the tokens"
        )


class Penalties(NamedTuple):
    """Earlier tokens of rows, and the penalties for repeating them. A pytree."""

    before: Any
    """int32 `[rows, tokens]`: tokens of the prompt, then generated ones, then -1."""
    prompt: Any
    """int32: tokens of the prompt."""
    repetition: Any
    """float32, as the two that follow; see `SamplingOptions`."""
    presence: Any
    frequency: Any

    @classmethod
    def none(cls, rows: int, tokens: int) -> "Penalties":
        """Penalties that change nothing, with room for so many tokens."""
        zeros = partial(np.zeros, rows, np.float32)
        before = np.full((rows, tokens), -1, np.int32)
        return cls(before, np.zeros(rows, np.int32), np.ones(rows, np.float32), zeros(), zeros())


class RowOptions(NamedTuple):
    """Part of `SamplingOptions` that the device needs for each row. A pytree."""

    min_p: Any
    """float32."""
    min_tokens: Any
    """int32: tokens until which none of the row's `stops` is drawn."""
    penalties: Penalties | None = None
    """None if no row has any, which may be a program of its own."""

    @classmethod
    def none(cls, rows: int, penalties: Penalties | None = None) -> "RowOptions":
        """Options that change nothing but what penalties do."""
        return cls(np.zeros(rows, np.float32), np.zeros(rows, np.int32), penalties)


class Rows(NamedTuple):
    """Inputs of the rows of one decode call, one entry each. A pytree."""

    tokens: Any
    """int32: the token to read first."""
    positions: Any
    """int32: its position."""
    table: Any
    """int32 `[rows, blocks]`: pages, see `KVCache`."""
    slots: Any
    """int32: slot of the bank, -1: the base model."""
    states: Any
    """int32: slot of the row's state, where the model has such."""
    seeds: Any
    """uint32 `[rows, 2]`, see `seed_words`."""
    sample_index: Any
    """int32."""
    steps: Any
    """int32: tokens generated before."""
    limits: Any
    """int32: tokens to generate at most; 0 in idle rows."""
    stops: Any
    """int32 `[rows, STOP_IDS]`: tokens that end the row; -1: none."""
    temperature: Any
    """float32."""
    scale: Any
    """float32: the temperature at which log-probabilities are told."""
    top_k: Any
    """int32, 0: off."""
    top_p: Any
    """float32."""
    top: Any
    """bool: whether the most likely tokens are asked for."""
    options: RowOptions | None
    """None if no row has any, which may be a program of its own."""

    @classmethod
    def idle(cls, rows: int, blocks: int, options: bool = False, penalties: bool = False) -> "Rows":
        """Rows that do nothing, with or without options, which may have penalties."""
        zeros = partial(np.zeros, rows)
        some = Penalties.none(rows, blocks * PAGE_SIZE) if penalties else None
        return cls(
            tokens=zeros(np.int32),
            positions=zeros(np.int32),
            table=np.full((rows, blocks), SCRATCH, np.int32),
            slots=np.full(rows, -1, np.int32),
            states=np.full(rows, SCRATCH, np.int32),
            seeds=np.zeros((rows, 2), np.uint32),
            sample_index=zeros(np.int32),
            steps=zeros(np.int32),
            limits=zeros(np.int32),
            stops=np.full((rows, STOP_IDS), -1, np.int32),
            temperature=zeros(np.float32),
            scale=np.ones(rows, np.float32),
            top_k=zeros(np.int32),
            top_p=np.ones(rows, np.float32),
            top=zeros(bool),
            options=RowOptions.none(rows, some) if options else None,
        )


class Drawn(NamedTuple):
    """Output of one decode call, `[BURST, rows]`; steps that it did not make are zeros."""

    tokens: Any
    """int32."""
    logprobs: Any
    """float32."""
    top_ids: Any
    """int32 `[BURST, rows, TOP_WIDTHS[-1]]`."""
    top_logprobs: Any
    """float32, as `top_ids`."""


def top_width(k: int, vocab_size: int) -> int:
    """Number of most likely tokens to find where `k` are asked for, which are no more than the widest; 0 for none."""
    return min(next(width for width in (0, *TOP_WIDTHS) if width >= k), vocab_size)


class Group(NamedTuple):
    """Versions whose rows are decoded in one call."""

    places: dict[int, int]
    """Slot of the version pool: number by which `Rows.slots` has it."""
    handle: Any = None
    """The runner's own."""


class PromptChunk(NamedTuple):
    """Tokens of a prompt that are read at once."""

    table: Sequence[int]
    """Pages of the sequence, in order."""
    tokens: np.ndarray
    """int32 `[n]`, no more than the largest of a runner's `chunks`."""
    start: int
    """Position of the first."""
    state: int
    """Slot of the state after the tokens before, where the model has such. At 0 it may be anything."""


class ModelRunner(ABC, Generic[Version]):
    """Computation of a sampler on one base model. Called by one thread."""

    vocab_size: int
    """Tokens there are."""
    token_bytes: int
    """Keys and values of one token in all layers."""
    state_bytes: int = 0
    """State of one sequence in all layers whose memory of earlier tokens is of fixed size."""
    row_counts: tuple[int, ...] | None = None
    """Numbers of rows that a decode call may have, ascending; those that are left over are idle. None: any."""
    chunks: tuple[int, ...] = CHUNKS
    """Tokens of a prompt that a call may read, ascending; of the last that fits some are left over."""
    reads_together: bool = False
    """True if a call may read pieces of several prompts, as many tokens as the largest of `chunks` together."""
    chunks_while_idle: int = 1
    """Chunks of prompts that a burst reads if no sequence is decoded that would wait for it."""

    @abstractmethod
    def open(self, pages: int, blocks: int, states: int) -> None:
        """Say what the cache has: pages, those of a sequence at most, and slots of states, if the model has such.

        They may be made when they are needed.
        """

    @property
    @abstractmethod
    def lost(self) -> bool:
        """True if what is in the pages is lost, as a call that changes them did not finish."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all pages and states: what is in them is lost, and nobody holds any."""

    @abstractmethod
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, target). Returns when it is done, so that a failure is that of who copies."""

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states (source, target), as `copy_pages`. There are none to copy where the model has no states."""
        assert not pairs, pairs

    @abstractmethod
    def read(self, version: Version | None, pieces: Sequence[PromptChunk]) -> list[list[States]]:
        """Read tokens of prompts into pages, and into their states.

        Args:
            version: Weights; None is the base model.
            pieces: Of prompts; one, unless the runner reads several together.

        Returns the hidden states of each piece, `SCORED_AT_ONCE` tokens in each block, for `project`.
        """

    @abstractmethod
    def project(self, version: Version | None, states: States) -> Logits:
        """Logits of a block."""

    @abstractmethod
    def pick(self, logits: Logits, ids: np.ndarray) -> np.ndarray:
        """Log-probabilities float32 of the tokens `ids` int32 `[SCORED_AT_ONCE, width]`, one of `TARGET_WIDTHS`."""

    @abstractmethod
    def best(self, logits: Logits, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The `k` most likely tokens int32 `[rows, k]`, the first of equals first, and their log-probabilities."""

    @abstractmethod
    def alternatives(
        self, logits: Logits, seed: np.ndarray, position: int, first: int, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws int32 `[rows, DRAWS_AT_ONCE]` with replacement, and their log-probabilities at temperature 1.

        Args:
            logits: Of a block.
            seed: uint32 `[2]`, as `seed_words`.
            position: Of the block's first row. A draw's number is that of (seed, LARGEST_INT32 - draw, position).
            first: Number of the first draw of each row.
            temperature: 0 takes the most likely token every time.
        """

    @abstractmethod
    def groups(self, slots: Sequence[int]) -> list[Group]:
        """Versions in these slots of the pool, by the calls that decode them; each slot is in one."""

    @abstractmethod
    def decode(self, group: Group, rows: Rows, steps: int) -> Any:
        """Start generating up to `steps` tokens in each row, no more than `BURST`, until all have ended.

        Returns what `drawn` takes. A row ends with its limit or with one of its stops, after which nothing counts.
        """

    @abstractmethod
    def drawn(self, decoded: Any, top: bool) -> Drawn:
        """Output of `decode` on the host; the most likely tokens only if they are asked for."""

    def forget_versions(self) -> None:
        """Forget copies of versions: a call that may have changed them did not finish."""

    def warm_up(self) -> Iterator[Any]:
        """Make ready what requests will need, piece by piece, before there are any."""
        return iter(())
