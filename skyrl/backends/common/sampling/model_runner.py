"""Model runner: computes prefill, decode steps and scores for a sampler.

The sampler decides on admission, pages, prefixes, stops and order. A runner executes calls for any version; versions
are handles that the sampler passes on unchanged.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from skyrl.backends.common.page_table import PAGE_SIZE, SCRATCH
from skyrl.types import SamplingOptions

Version = TypeVar("Version")
States = Any
"""Hidden states of up to `SCORED_AT_ONCE` prompt tokens."""
Logits = Any
"""Logits for a block of `States`."""

CHUNKS = (32, 64, 256)
"""Prefill chunk sizes in tokens."""

BURST = 8
"""Maximum number of tokens per row in one decode call."""

STOP_IDS = 8
"""Maximum stop tokens that end a row inside a decode call. Afterwards the host checks all stop tokens."""

SCORED_AT_ONCE = 32
"""Prompt tokens whose logits over the whole vocabulary are in memory at once. Divides every chunk size."""

TOP_WIDTHS = (8, 64)
"""Supported numbers of most likely tokens per call, for all top-k options."""

TARGET_WIDTHS = (1, 8, 64, 512)
"""Supported numbers of given tokens per row to score in one call. Scores of the next token use 1; more tokens take
several calls."""

DRAWS_AT_ONCE = 8
"""Alternatives per prompt token drawn by one call."""

LARGEST_INT32 = 2**31 - 1
HOTTEST = 1e30
"""Maximum temperature. Above it, the distribution is uniform in practice, and the value may not fit into float32."""


def chunks_within(tokens: int) -> tuple[int, ...]:
    """Return the sizes in `CHUNKS` that fit into a call of this many tokens; 0: all."""
    return tuple(size for size in CHUNKS if size <= tokens) if tokens else CHUNKS


def check_call_tokens(tokens: int, rows: int) -> None:
    """Raise `ValueError` if calls of this many tokens (0: any) are too small.

    A call must have room for the smallest chunk, and for one token per row.
    """
    if 0 < tokens < CHUNKS[0]:
        raise ValueError(f"sample_max_num_batched_tokens={tokens} is below {CHUNKS[0]}; use more, or 0")
    if 0 < tokens < rows:
        raise ValueError(
            f"sample_max_num_sequences={rows} is above sample_max_num_batched_tokens={tokens}, and each sequence has a "
            "token in a call; lower it, or raise the tokens"
        )


class Penalties(NamedTuple):
    """Earlier tokens of rows, and the penalties for repeating them, one entry per row. A pytree."""

    before: Any
    """int32 `[rows, tokens]`: prompt tokens, then generated tokens, then -1."""
    prompt: Any
    """int32: number of prompt tokens."""
    repetition: Any
    """float32, as the next two fields; see `SamplingOptions`."""
    presence: Any
    frequency: Any

    @classmethod
    def none(cls, rows: int, tokens: int) -> "Penalties":
        """Penalties without effect, with room for this many tokens."""
        zeros = partial(np.zeros, rows, np.float32)
        before = np.full((rows, tokens), -1, np.int32)
        return cls(before, np.zeros(rows, np.int32), np.ones(rows, np.float32), zeros(), zeros())


class RowOptions(NamedTuple):
    """Sampling options that the device needs, one entry per row, by their names in `SamplingOptions`. A pytree."""

    min_p: Any
    """float32."""
    min_tokens: Any
    """int32: minimum number of generated tokens. Until then, none of the row's `stops` is drawn."""
    penalties: Penalties | None = None
    """None if no row has penalties; this case may have a separate program."""

    @classmethod
    def none(cls, rows: int, penalties: Penalties | None = None) -> "RowOptions":
        """Options without effect, except for the given penalties."""
        return cls(np.zeros(rows, np.float32), np.zeros(rows, np.int32), penalties)

    @property
    def filters(self) -> dict[str, Any]:
        """Options that restrict the tokens of a draw, in addition to top_k and top_p, by name."""
        return {"min_p": self.min_p}

    def fill(self, row: int, options: SamplingOptions) -> None:
        """Set the options of a row, except penalties."""
        for name in self._fields:
            if name != "penalties":
                getattr(self, name)[row] = getattr(options, name)


class Rows(NamedTuple):
    """Inputs of one decode call, one entry per row. A pytree.

    Rows with higher positions come first, so that runners can read the pages of long rows by themselves.
    """

    tokens: Any
    """int32: first input token."""
    positions: Any
    """int32: position of that token."""
    table: Any
    """int32 `[rows, blocks]`: pages, see `KVCache`."""
    slots: Any
    """int32: slot in the adapter bank; -1: the base model."""
    states: Any
    """int32: slot of the recurrent state, if the model has states."""
    seeds: Any
    """uint32 `[rows, 2]`, see `seed_words`."""
    sample_index: Any
    """int32: index of the sample in its request."""
    steps: Any
    """int32: number of tokens generated before."""
    limits: Any
    """int32: maximum number of tokens to generate; 0 in idle rows."""
    stops: Any
    """int32 `[rows, STOP_IDS]`: tokens that end the row; -1: none."""
    temperature: Any
    """float32."""
    scale: Any
    """float32: temperature of the returned log-probabilities."""
    top_k: Any
    """int32; 0: off."""
    top_p: Any
    """float32."""
    top: Any
    """bool: True if the most likely tokens are requested."""
    options: RowOptions | None
    """None if no row has options; this case may have a separate program."""

    @classmethod
    def idle(cls, rows: int, blocks: int, options: bool = False, penalties: bool = False) -> "Rows":
        """Idle rows, with or without options, optionally with penalties."""
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
    """Output of one decode call, `[BURST, rows]`. Steps that were not run are zeros."""

    tokens: Any
    """int32."""
    logprobs: Any
    """float32."""
    top_ids: Any
    """int32 `[BURST, rows, TOP_WIDTHS[-1]]`."""
    top_logprobs: Any
    """float32, in the shape of `top_ids`."""


def top_width(k: int, vocab_size: int) -> int:
    """Smallest supported width for `k` most likely tokens, where `k` is at most the largest width; 0 for `k` = 0."""
    return min(next(width for width in (0, *TOP_WIDTHS) if width >= k), vocab_size)


class Group(NamedTuple):
    """Versions whose rows are decoded in one call."""

    places: dict[int, int]
    """Index in the adapter bank (the value of `Rows.slots`) of each slot of the version pool."""
    handle: Any = None
    """Value for the runner's own use."""


class PromptChunk(NamedTuple):
    """Prompt tokens of one prefill call."""

    table: Sequence[int]
    """Pages of the sequence, in order."""
    tokens: np.ndarray
    """int32 `[n]`, at most the largest of the runner's `chunks`."""
    start: int
    """Position of the first token."""
    state: int
    """Slot of the recurrent state after the earlier tokens, if the model has states. Its content is ignored if `start`
    is 0."""


class ModelRunner(ABC, Generic[Version]):
    """Computation for a sampler on one base model. Called by one thread."""

    vocab_size: int
    """Size of the vocabulary."""
    token_bytes: int
    """Bytes of the keys and values of one token in all layers."""
    state_bytes: int = 0
    """Bytes of the recurrent state of one sequence, in all layers that have one."""
    row_counts: tuple[int, ...] | None = None
    """Supported numbers of rows of a decode call, ascending; unused rows are idle. None: any number."""
    chunks: tuple[int, ...] = CHUNKS
    """Supported chunk sizes in tokens, ascending; a chunk may be partly filled."""
    reads_together: bool = False
    """True if one call can prefill several prompts, which together have at most `chunks[-1]` tokens."""
    chunks_while_idle: int = 1
    """Prefill chunks per burst while no sequence is running, so that they delay no decoding."""

    @abstractmethod
    def open(self, pages: int, blocks: int, states: int) -> None:
        """Set the size of the cache: pages, maximum pages per sequence, and state slots, if the model has states.

        The runner may allocate the memory later.
        """

    @property
    @abstractmethod
    def lost(self) -> bool:
        """True if the cache content is lost because a call that changes it did not finish."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the content of all pages and states. None may be in use."""

    @abstractmethod
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, target). Returns when the copy is done, so an error is raised here."""

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states (source, target), like `copy_pages`. Without effect if the model has no states."""
        assert not pairs, pairs

    @abstractmethod
    def read(self, version: Version | None, pieces: Sequence[PromptChunk]) -> list[list[States]]:
        """Prefill: read prompt tokens into pages, and into the states of their sequences.

        Args:
            version: Weights; None is the base model.
            pieces: Chunks of prompts; one, unless `reads_together`.

        Returns the hidden states of each chunk, in blocks of `SCORED_AT_ONCE` tokens, for `project`.
        """

    @abstractmethod
    def project(self, version: Version | None, states: States) -> Logits:
        """Logits of a block."""

    @abstractmethod
    def pick(self, logits: Logits, ids: np.ndarray) -> np.ndarray:
        """Log-probabilities, float32, of `ids` (int32 `[SCORED_AT_ONCE, width]`, with a width in `TARGET_WIDTHS`)."""

    @abstractmethod
    def best(self, logits: Logits, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The `k` most likely tokens, int32 `[rows, k]`, and their log-probabilities. Ties go to the smaller id."""

    @abstractmethod
    def alternatives(
        self, logits: Logits, seed: np.ndarray, position: int, first: int, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw int32 `[rows, DRAWS_AT_ONCE]` tokens with replacement; also returns their log-probabilities at
        temperature 1.

        Args:
            logits: Logits of a block.
            seed: uint32 `[2]`, as returned by `seed_words`.
            position: Position of the block's first row. Draw `n` of a row uses the random number of (seed, sample index
                LARGEST_INT32 - `n`, step = position of the row).
            first: Index of the first draw of each row.
            temperature: With 0, each draw is the most likely token.
        """

    @abstractmethod
    def groups(self, slots: Sequence[int]) -> list[Group]:
        """Group the versions in these slots of the pool by the calls that decode them. Each slot is in one group."""

    @abstractmethod
    def decode(self, group: Group, rows: Rows, steps: int) -> Any:
        """Start a call that generates up to `steps` tokens (at most `BURST`) in each row, until all rows have ended.

        Returns the argument for `drawn`. A row ends at its limit or at one of its stops; later tokens are invalid.
        """

    @abstractmethod
    def drawn(self, decoded: Any, top: bool) -> Drawn:
        """Copy the output of `decode` to the host. The most likely tokens are copied only if `top` is True."""

    def forget_versions(self) -> None:
        """Discard copies of versions, because a call that may have changed them did not finish."""

    def warm_up(self) -> Iterator[Any]:
        """Prepare for requests in advance, such as by compilation, one step at a time."""
        return iter(())
