"""The compiled programs of sampling: reading a prompt by chunks, decoding rows for some steps, copying pages.

Pure functions of (base, adapters, pool of pages, data). Shapes come from the short lists below and in `decoding`,
everything a request can choose is data, so the number of programs is bounded and small; `compiled` counts them. The
backend sets the matmul precision around all its programs, so that sampler and trainer compute alike.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from skyrl.backends.common.page_table import SCRATCH
from skyrl.backends.jax.compile_cache import Compiler
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.layers.logprobs import logprobs_of
from skyrl.tx.lora import empty_bank, write_slot
from skyrl.tx.models.types import PAGE_SIZE, KVCache
from skyrl.tx.sampling import draw_tokens, sample_tokens, uniforms, without_tokens

CHUNKS = (32, 64, 256)
"""Tokens of a prompt read at once."""

BURST = 8
"""Tokens that a decode call generates at most."""

COPIES = (1, 32)
"""Pages that are copied at once."""

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


QUICKLY_COMPILED = {"xla_backend_optimization_level": 1}
"""On a CPU: LLVM's levels above take a fifth longer to compile these programs, which then run no faster."""

Pool = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Keys and values of all pages, as in `KVCache`."""


class RowOptions(NamedTuple):
    """Of `SamplingOptions`, what the device has to know of each row. A pytree."""

    min_p: Any
    """float32."""
    min_tokens: Any
    """int32: tokens until which none of the row's `stops` is drawn."""


class Rows(NamedTuple):
    """What the rows of one decode call are about, one entry each. A pytree."""

    tokens: Any
    """int32: the token to read first."""
    positions: Any
    """int32: its position."""
    table: Any
    """int32 `[rows, blocks]`: pages, see `KVCache`."""
    slots: Any
    """int32: slot of the bank, -1: the base model."""
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
    """None, which is a program of its own, if no row has any."""

    @classmethod
    def idle(cls, rows: int, blocks: int, options: bool = False) -> "Rows":
        """Rows that do nothing, for a program with or without options."""
        zeros = partial(np.zeros, rows)
        return cls(
            tokens=zeros(np.int32),
            positions=zeros(np.int32),
            table=np.full((rows, blocks), SCRATCH, np.int32),
            slots=np.full(rows, -1, np.int32),
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
            options=RowOptions(min_p=zeros(np.float32), min_tokens=zeros(np.int32)) if options else None,
        )


class Drawn(NamedTuple):
    """What one decode call has generated, `[BURST, rows]`; steps that it did not make are zeros."""

    tokens: Any
    """int32."""
    logprobs: Any
    """float32."""
    top_ids: Any
    """int32 `[BURST, rows, TOP_WIDTHS[-1]]`."""
    top_logprobs: Any
    """float32, as `top_ids`."""


def _drawn(logits: jax.Array, numbers: jax.Array, rows: Rows, steps: jax.Array) -> jax.Array:
    """Tokens int32 `[rows]` that the rows draw after `steps` int32 `[rows]` others."""
    filters = rows.temperature, rows.top_k, rows.top_p
    if rows.options is None:
        return sample_tokens(logits, numbers, *filters)
    logits = without_tokens(logits, rows.stops, steps < rows.options.min_tokens)
    return sample_tokens(logits, numbers, *filters, rows.options.min_p)


def top_width(k: int, vocab_size: int) -> int:
    """How many most likely tokens to find where `k` are asked for, which are no more than the widest; 0 for none."""
    return min(next(width for width in (0, *TOP_WIDTHS) if width >= k), vocab_size)


class SamplingPrograms:
    """The programs for one model. Those that take a pool and return one consume the one they are given."""

    def __init__(self, graphdef: Any, model_config: Any, base: Any, deterministic: bool):
        self._graphdef = graphdef
        self._config = model_config
        token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        self.cache_dtype = jax.eval_shape(
            lambda base, token: nnx.merge(graphdef, base)(token, positions=token).last_hidden_state, base, token
        ).dtype
        self._compiler = Compiler("sampling", deterministic, QUICKLY_COMPILED)
        self.decode = self._program(self._decode, donate="pool")
        self.prefill = self._program(self._prefill, donate="pool")
        self.project = self._program(self._project)
        self.pick = self._program(self._pick)
        self.best = self._program(self._best, static="k")
        self.alternatives = self._program(self._alternatives)
        self.copy_pages = self._program(self._copy_pages, donate="pool")
        self.empty_bank = self._program(self._empty_bank, static="slots")
        self.write_slot = self._program(self._write_slot, donate="bank")

    def pool_shapes(self, pages: int) -> Pool:
        """Shapes and types of a pool of so many pages."""
        return jax.eval_shape(lambda: KVCache.pool(self._config, pages, self.cache_dtype))

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        shapes = jax.tree.leaves(self.pool_shapes(1))
        return sum(shape.size * shape.dtype.itemsize for shape in shapes) // PAGE_SIZE

    def _program(self, function: Callable, donate: str | None = None, static: str | None = None) -> Callable:
        name = function.__name__.strip("_")
        return self._compiler.jit(name, function, donate_argnames=donate, static_argnames=static)

    @property
    def compiled(self) -> int:
        """Programs compiled so far."""
        return self._compiler.compiled

    def _decode(self, base: Any, bank: Adapter | None, pool: Pool, rows: Rows, steps: jax.Array) -> tuple[Pool, Drawn]:
        """Generate up to `steps` tokens in every row, until all have reached their limits or a stop token.

        A row that has ended repeats its last step, which changes nothing, until the others have too.
        """
        model = nnx.merge(self._graphdef, base)
        count, width = len(rows.tokens), min(TOP_WIDTHS[-1], self._config.vocab_size)
        slots = None if bank is None else rows.slots

        def step(carry: Any) -> Any:
            done, pool, tokens, positions, active, drawn = carry
            output = model(
                tokens[:, None],
                positions=positions[:, None],
                adapter=bank,
                adapter_index=slots,
                kv_cache=KVCache(pool[0], pool[1], rows.table),
            )
            logits = model.compute_logits(output.last_hidden_state[:, 0], adapter=bank, adapter_index=slots)
            numbers = uniforms(rows.seeds, rows.sample_index, rows.steps + done)
            following = _drawn(logits, numbers, rows, rows.steps + done)
            scored = logits / rows.scale[:, None]
            logprobs = logprobs_of(scored, following[:, None])[:, 0]
            none = jnp.zeros((count, width), jnp.int32), jnp.zeros((count, width), jnp.float32)
            best = jax.lax.cond(rows.top.any(), lambda: self._best(scored, k=width), lambda: none)
            new = Drawn(following, logprobs, *best)
            drawn = jax.tree.map(lambda sofar, one: sofar.at[done].set(one), drawn, new)
            ended = (following[:, None] == rows.stops).any(axis=1) | (done + 1 >= rows.limits)
            active &= ~ended
            tokens = jnp.where(active, following, tokens)
            positions = positions + active.astype(jnp.int32)
            pool = output.kv_cache.keys, output.kv_cache.values
            return done + 1, pool, tokens, positions, active, drawn

        def goes_on(carry: Any) -> jax.Array:
            return (carry[0] < steps) & carry[4].any()

        shape, wide = (BURST, count), (BURST, count, width)
        drawn = Drawn(
            jnp.zeros(shape, jnp.int32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros(wide, jnp.int32),
            jnp.zeros(wide, jnp.float32),
        )
        start = jnp.int32(0), pool, rows.tokens, rows.positions, rows.limits > 0, drawn
        _, pool, _, _, _, drawn = jax.lax.while_loop(goes_on, step, start)
        return pool, drawn

    def _prefill(
        self, base: Any, adapter: Adapter | None, pool: Pool, table: jax.Array, tokens: jax.Array, start: jax.Array
    ) -> tuple[Pool, list[jax.Array]]:
        """Read `tokens` int32 `[chunk]` into the pages `table` `[blocks]` of one row, from position `start` on.

        Returns the pool and the tokens' hidden states in blocks `[SCORED_AT_ONCE, features]`, for `project`.
        """
        model = nnx.merge(self._graphdef, base)
        positions = (start + jnp.arange(tokens.shape[0], dtype=jnp.int32))[None]
        output = model(tokens[None], positions=positions, adapter=adapter, kv_cache=KVCache(*pool, table[None]))
        assert output.kv_cache is not None
        blocks = jnp.split(output.last_hidden_state[0], tokens.shape[0] // SCORED_AT_ONCE)
        return (output.kv_cache.keys, output.kv_cache.values), blocks

    def _project(self, base: Any, adapter: Adapter | None, hidden: jax.Array) -> jax.Array:
        """Logits float32 `[SCORED_AT_ONCE, vocab]` of hidden states `[SCORED_AT_ONCE, features]`."""
        return nnx.merge(self._graphdef, base).compute_logits(hidden, adapter=adapter)

    def _pick(self, logits: jax.Array, ids: jax.Array) -> jax.Array:
        """Logprobs `[rows, width]` of the tokens `ids` int32 `[rows, width]`."""
        return logprobs_of(logits, ids)

    def _best(self, logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """The `k` most likely tokens int32 `[rows, k]`, the first of equals first, and their logprobs."""
        top, ids = jax.lax.top_k(logits, k)
        return ids.astype(jnp.int32), top - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def _alternatives(
        self, logits: jax.Array, seed: jax.Array, position: jax.Array, first: jax.Array, temperature: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Draws int32 `[SCORED_AT_ONCE, DRAWS_AT_ONCE]` and their logprobs.

        They are numbers `first`, ... of the rows from `position` on, and depend on nothing else.
        """
        rows = jnp.arange(SCORED_AT_ONCE, dtype=jnp.int32)
        seeds = jnp.broadcast_to(seed, (SCORED_AT_ONCE, 2))

        def numbers(draw: jax.Array) -> jax.Array:
            return uniforms(seeds, jnp.broadcast_to(LARGEST_INT32 - draw, rows.shape), position + rows)

        draws = first + jnp.arange(DRAWS_AT_ONCE, dtype=jnp.int32)
        return draw_tokens(logits, jax.vmap(numbers, out_axes=1)(draws), temperature)

    def _copy_pages(self, pool: Pool, sources: jax.Array, targets: jax.Array) -> Pool:
        """`pool` with pages `sources` int32 `[n]` copied to `targets`, in all layers."""

        def copy(leaf: jax.Array) -> jax.Array:
            layers = 1 if self._config.unroll_layers else self._config.num_hidden_layers
            first = jnp.arange(layers, dtype=jnp.int32)[:, None] * (leaf.shape[0] // layers)
            source, target = ((first + pages[None]).reshape(-1) for pages in (sources, targets))
            return leaf.at[target].set(leaf[source])

        return jax.tree.map(copy, pool)

    def _empty_bank(self, adapter: Adapter, slots: int) -> Adapter:
        return empty_bank(adapter, slots, self._config.unroll_layers)

    def _write_slot(self, bank: Adapter, slot: jax.Array, adapter: Adapter) -> Adapter:
        return write_slot(bank, slot, adapter)
