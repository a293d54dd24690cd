"""The compiled programs of sampling: prefill of prompt chunks, decoding steps, and copies of cached pages.

All are pure functions of (base, adapters, pool of pages, data). Shapes come from the short lists in `runner` and
`model_runner`, and everything that a request can choose is data, so the number of programs is small; `compiled` counts
them. The backend sets the matmul precision of all its programs, so sampler and trainer compute alike.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from skyrl.backends.common.page_table import PAGE_SIZE
from skyrl.backends.common.sampling.model_runner import (
    BURST,
    DRAWS_AT_ONCE,
    LARGEST_INT32,
    SCORED_AT_ONCE,
    TOP_WIDTHS,
    Drawn,
    Rows,
)
from skyrl.backends.jax.compile_cache import Compiler
from skyrl.backends.jax.layout import Layout
from skyrl.tx.design.design import DeltaNet
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.layers.logprobs import logprobs_of
from skyrl.tx.lora import all_targets, empty_bank, write_slot
from skyrl.tx.models.types import KVCache, Pool, cache_parts
from skyrl.tx.sampling import Occurrences, draw_tokens, most_likely, penalised, sample_tokens, uniforms, without_tokens

QUICKLY_COMPILED = {"xla_backend_optimization_level": 1}
"""On a CPU: higher LLVM levels compile these programs a fifth slower, without a gain at run time."""


def _drawn(
    logits: jax.Array, numbers: jax.Array, rows: Rows, steps: jax.Array, occurred: Occurrences | None
) -> jax.Array:
    """Draw the next token of each row, int32 `[rows]`. `steps`, int32 `[rows]`, counts earlier tokens."""
    assert rows.options is not None
    if (penalties := rows.options.penalties) is not None:
        assert occurred is not None
        logits = penalised(logits, occurred, penalties.repetition, penalties.presence, penalties.frequency)
    early = steps < rows.options.min_tokens
    logits = jax.lax.cond(early.any(), without_tokens, lambda logits, *_: logits, logits, rows.stops, early)
    return sample_tokens(logits, numbers, rows.temperature, rows.top_k, rows.top_p, **rows.options.filters)


def _copied(sources: jax.Array, targets: jax.Array, leaf: jax.Array, layers: int) -> jax.Array:
    """Copy `sources` to `targets` in each layer of `leaf`, which holds pages or states of consecutive `layers`."""
    first = jnp.arange(layers, dtype=jnp.int32)[:, None] * (leaf.shape[0] // layers)
    source, target = ((first + places[None]).reshape(-1) for places in (sources, targets))
    return leaf.at[target].set(leaf[source])


class SamplingPrograms:
    """The programs for one model. Programs that take and return a pool consume the pool that they take."""

    def __init__(self, graphdef: Any, model_config: Any, base: Any, deterministic: bool, layout: Layout):
        self._graphdef = graphdef
        self._config = model_config
        self._deterministic = deterministic
        self._layout = layout
        self._targets = all_targets(model_config)
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
        self.copy_states = self._program(self._copy_states, donate="pool")
        self.empty_bank = self._program(self._empty_bank, static="slots")
        self.write_slot = self._program(self._write_slot, donate="bank")

    def pool_shapes(self, pages: int, states: int) -> Pool:
        """Shapes and dtypes of a pool with this many pages and states."""
        return jax.eval_shape(lambda: KVCache.pool(self._config, pages, self.cache_dtype, PAGE_SIZE, states))

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache per token in all layers, on one device."""
        return self._pool_bytes(1, 0) // PAGE_SIZE

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state per sequence in all layers that have one."""
        return self._pool_bytes(0, 1)

    def _pool_bytes(self, pages: int, states: int) -> int:
        shapes = self.pool_shapes(pages, states)
        return self._layout.nbytes(shapes, self._layout.of_pool(shapes))

    def _program(self, function: Callable, donate: str | None = None, static: str | None = None) -> Callable:
        name = function.__name__.strip("_")
        return self._compiler.jit(name, function, donate_argnames=donate, static_argnames=static)

    @property
    def compiled(self) -> int:
        """Number of compiled programs."""
        return self._compiler.compiled

    def _decode(self, base: Any, bank: Adapter | None, pool: Pool, rows: Rows, steps: jax.Array) -> tuple[Pool, Drawn]:
        """Generate up to `steps` tokens in every row, until all rows have reached their limit or a stop token.

        A row that has ended repeats its last step, without effect, until all rows have ended.
        """
        model = nnx.merge(self._graphdef, base)
        count, width = len(rows.tokens), min(TOP_WIDTHS[-1], self._config.vocab_size)
        slots = None if bank is None else rows.slots

        def step(carry: Any) -> Any:
            done, pool, tokens, positions, active, drawn, occurred = carry
            output = model(
                tokens[:, None],
                positions=positions[:, None],
                adapter=bank,
                adapter_index=slots,
                kv_cache=KVCache.of(pool, rows.table, rows.states),
                longest_first=not self._deterministic,
            )
            logits = model.compute_logits(output.last_hidden_state[:, 0], adapter=bank, adapter_index=slots)
            numbers = uniforms(rows.seeds, rows.sample_index, rows.steps + done)
            following = _drawn(logits, numbers, rows, rows.steps + done, occurred)
            occurred = None if occurred is None else occurred.after(following)
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
            return done + 1, output.kv_cache.as_pool, tokens, positions, active, drawn, occurred

        def goes_on(carry: Any) -> jax.Array:
            return (carry[0] < steps) & carry[4].any()

        shape, wide = (BURST, count), (BURST, count, width)
        drawn = Drawn(
            jnp.zeros(shape, jnp.int32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros(wide, jnp.int32),
            jnp.zeros(wide, jnp.float32),
        )
        penalties, occurred = rows.options.penalties if rows.options is not None else None, None
        if penalties is not None:
            occurred = Occurrences.of(penalties.before, penalties.prompt, self._config.vocab_size)
        start = jnp.int32(0), pool, rows.tokens, rows.positions, rows.limits > 0, drawn, occurred
        _, pool, _, _, _, drawn, _ = jax.lax.while_loop(goes_on, step, start)
        return self._layout.constrained_pool(pool), self._layout.on_all(drawn)

    def _prefill(
        self,
        base: Any,
        adapter: Adapter | None,
        pool: Pool,
        table: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
        state: jax.Array,
    ) -> tuple[Pool, list[jax.Array]]:
        """Prefill `tokens` int32 `[chunk]` into the pages `table` `[blocks]` of one row, from position `start`.

        The first `count` tokens update the row's recurrent `state`, if the model has one. Returns the pool, and the
        tokens' hidden states in blocks `[SCORED_AT_ONCE, features]` for `project`.
        """
        model = nnx.merge(self._graphdef, base)
        numbers = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        output = model(
            tokens[None],
            positions=(start + numbers)[None],
            segment_ids=jnp.where(numbers < count, 0, -1)[None],
            adapter=adapter,
            kv_cache=KVCache.of(pool, table[None], state[None]),
        )
        assert output.kv_cache is not None
        blocks = jnp.split(output.last_hidden_state[0], tokens.shape[0] // SCORED_AT_ONCE)
        return self._layout.constrained_pool(output.kv_cache.as_pool), self._layout.on_all(blocks)

    def _project(self, base: Any, adapter: Adapter | None, hidden: jax.Array) -> jax.Array:
        """Logits float32 `[SCORED_AT_ONCE, vocab]` of hidden states `[SCORED_AT_ONCE, features]`."""
        return nnx.merge(self._graphdef, base).compute_logits(hidden, adapter=adapter)

    def _pick(self, logits: jax.Array, ids: jax.Array) -> jax.Array:
        """Log-probabilities `[rows, width]` of the tokens `ids` int32 `[rows, width]`."""
        return logprobs_of(logits, ids)

    def _best(self, logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """The `k` most likely tokens int32 `[rows, k]`, ties in order of ids, and their log-probabilities."""
        top, ids = most_likely(logits, k)
        return ids.astype(jnp.int32), top - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def _alternatives(
        self, logits: jax.Array, seed: jax.Array, position: jax.Array, first: jax.Array, temperature: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Draws int32 `[SCORED_AT_ONCE, DRAWS_AT_ONCE]` and their log-probabilities.

        They are draws `first`, `first + 1`, ... of the rows from `position` on, and depend on nothing else.
        """
        rows = jnp.arange(SCORED_AT_ONCE, dtype=jnp.int32)
        seeds = jnp.broadcast_to(seed, (SCORED_AT_ONCE, 2))

        def numbers(draw: jax.Array) -> jax.Array:
            return uniforms(seeds, jnp.broadcast_to(LARGEST_INT32 - draw, rows.shape), position + rows)

        draws = first + jnp.arange(DRAWS_AT_ONCE, dtype=jnp.int32)
        return draw_tokens(logits, jax.vmap(numbers, out_axes=1)(draws), temperature)

    def _copy_pages(self, pool: Pool, sources: jax.Array, targets: jax.Array) -> Pool:
        """`pool` with pages `sources` int32 `[n]` copied to `targets`, in all layers."""
        keys, values, states = pool
        layers = tuple(part.layers for part in cache_parts(self._config) if not isinstance(part.mixer, DeltaNet))
        copied = jax.tree.map(partial(_copied, sources, targets), (keys, values), (layers, layers))
        return self._layout.constrained_pool((*copied, states))

    def _copy_states(self, pool: Pool, sources: jax.Array, targets: jax.Array) -> Pool:
        """Copy states, as `_copy_pages` copies pages."""
        keys, values, states = pool
        layers = tuple((part.layers,) * 2 for part in cache_parts(self._config) if isinstance(part.mixer, DeltaNet))
        copied = jax.tree.map(partial(_copied, sources, targets), states, layers)
        return self._layout.constrained_pool((keys, values, copied))

    def _empty_bank(self, adapter: Adapter, slots: int) -> Adapter:
        return self._layout.constrained(empty_bank(self._targets, adapter, slots, self._config.unroll_layers))

    def _write_slot(self, bank: Adapter, slot: jax.Array, adapter: Adapter) -> Adapter:
        return self._layout.constrained(write_slot(self._targets, bank, slot, adapter))
