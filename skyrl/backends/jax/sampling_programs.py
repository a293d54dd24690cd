"""The compiled programs of sampling: reading a prompt by chunks, one decode step of all rows, moving cache rows.

Pure functions of (base, bank, cache, data). Shapes come from `CacheShapes`, `CHUNKS` and the widths below, everything a
request can choose is data, so the number of programs is bounded and small; `compiled` counts them. Scores of a prompt
take three programs (`project`) and at most seven more: one per width, and one for all draws. The backend sets the
matmul precision around all its programs, so that sampler and trainer compute alike.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from skyrl.backends.jax.compilation import Compiler
from skyrl.tx.lora import read_slot
from skyrl.tx.models.types import Adapter, KVCache
from skyrl.tx.sampling import draw_tokens, sample_tokens, uniforms

CHUNKS = (32, 128, 512)
"""Tokens of a prompt read at once. Windows are multiples of the chunks used in them, so a chunk always has room."""

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


class DecodeBatch(NamedTuple):
    """Arrays with one entry per cache row. A pytree."""

    tokens: Any
    """int32: the token to read in this step."""
    positions: Any
    """int32: its position."""
    slots: Any
    """int32: bank slot of the row's version."""
    seeds: Any
    """uint32 `[rows, 2]`, see `seed_words`."""
    sample_index: Any
    """int32."""
    steps: Any
    """int32: tokens generated before."""
    temperature: Any
    """float32."""
    top_k: Any
    """int32, 0: off."""
    top_p: Any
    """float32."""

    @classmethod
    def idle(cls, rows: int) -> "DecodeBatch":
        """Rows that decode nothing of interest, greedily, with the base model."""
        zeros = partial(np.zeros, rows)
        return cls(
            tokens=zeros(np.int32),
            positions=zeros(np.int32),
            slots=zeros(np.int32),
            seeds=np.zeros((rows, 2), np.uint32),
            sample_index=zeros(np.int32),
            steps=zeros(np.int32),
            temperature=zeros(np.float32),
            top_k=zeros(np.int32),
            top_p=np.ones(rows, np.float32),
        )


def top_width(k: int, vocab_size: int) -> int:
    """How many most likely tokens to find where `k` are asked for, which are no more than the widest; 0 for none."""
    return min(next(width for width in (0, *TOP_WIDTHS) if width >= k), vocab_size)


class SamplingPrograms:
    """The programs for one model. Methods that take a cache and return one consume the one they are given."""

    def __init__(self, graphdef: Any, model_config: Any, base: Any):
        self._graphdef = graphdef
        self._config = model_config
        token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        self.cache_dtype = jax.eval_shape(
            lambda base, token: nnx.merge(graphdef, base)(token, positions=token).last_hidden_state, base, token
        ).dtype
        self._compiler = Compiler("sampling")
        self.decode = self._program(self._decode, donate="cache", static="one_version")
        self.draw = self._program(self._draw)
        self.prefill = self._program(self._prefill, donate="cache")
        self.project = self._program(self._project)
        self.pick = self._program(self._pick)
        self.best = self._program(self._best, static="k")
        self.alternatives = self._program(self._alternatives)
        self.insert = self._program(self._insert, donate="cache")
        self.reshape = self._program(self._reshape, static="window")

    def empty_cache(self, rows: int, window: int) -> KVCache:
        """A cache of zeros."""
        return KVCache.zeros(self._config, rows, window, self.cache_dtype)

    def _program(self, function: Callable, donate: str | None = None, static: str | None = None) -> Callable:
        name = function.__name__.strip("_")
        return self._compiler.jit(name, function, donate_argnames=donate, static_argnames=static)

    @property
    def compiled(self) -> int:
        """Programs compiled so far."""
        return self._compiler.compiled

    def _decode(
        self, base: Any, bank: Adapter, cache: KVCache, batch: DecodeBatch, one_version: bool
    ) -> tuple[KVCache, jax.Array]:
        """Read one token in every row: (cache, logits float32 `[rows, vocab]`).

        `one_version` says that all rows use the slot of row 0, which then takes plain matrix products.
        """
        model = nnx.merge(self._graphdef, base)
        adapter, index = (read_slot(bank, batch.slots[0]), None) if one_version else (bank, batch.slots)
        output = model(
            batch.tokens[:, None],
            positions=batch.positions[:, None],
            adapter=adapter,
            adapter_index=index,
            kv_cache=cache,
        )
        logits = model.compute_logits(output.last_hidden_state[:, 0], adapter=adapter, adapter_index=index)
        return output.kv_cache, logits

    def _draw(self, logits: jax.Array, batch: DecodeBatch) -> tuple[jax.Array, jax.Array]:
        """Next tokens int32 `[rows]` and their logprobs. A program of its own: it is the same for every window."""
        numbers = uniforms(batch.seeds, batch.sample_index, batch.steps)
        return sample_tokens(logits, numbers, batch.temperature, batch.top_k, batch.top_p)

    def _prefill(
        self, base: Any, bank: Adapter, cache: KVCache, slot: jax.Array, tokens: jax.Array, start: jax.Array
    ) -> tuple[KVCache, jax.Array]:
        """Read `tokens` int32 `[chunk]` into the one row of `cache`, from position `start` on.

        Returns the cache and the tokens' hidden states `[chunk, features]`, for `project`.
        """
        model, adapter = nnx.merge(self._graphdef, base), read_slot(bank, slot)
        positions = (start + jnp.arange(tokens.shape[0], dtype=jnp.int32))[None]
        output = model(tokens[None], positions=positions, adapter=adapter, kv_cache=cache)
        return output.kv_cache, output.last_hidden_state[0]

    def _project(self, base: Any, bank: Adapter, slot: jax.Array, hidden: jax.Array, offset: jax.Array) -> jax.Array:
        """Logits float32 `[SCORED_AT_ONCE, vocab]` of the states from `offset` on."""
        model, adapter = nnx.merge(self._graphdef, base), read_slot(bank, slot)
        block = jax.lax.dynamic_slice_in_dim(hidden, offset, SCORED_AT_ONCE)
        return model.compute_logits(block, adapter=adapter)

    def _pick(self, logits: jax.Array, ids: jax.Array) -> jax.Array:
        """Logprobs `[rows, width]` of the tokens `ids` int32 `[rows, width]`."""
        return jnp.take_along_axis(logits, ids, axis=-1) - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

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

    def _insert(self, cache: KVCache, prompt: KVCache, row: jax.Array) -> KVCache:
        """`cache` with one whole row replaced by that of `prompt`, zeros beyond the prompt's window."""

        def put(cache: jax.Array, prompt: jax.Array) -> jax.Array:
            prompt = jnp.pad(prompt, [(0, 0), (0, 0), (0, cache.shape[2] - prompt.shape[2]), (0, 0), (0, 0)])
            return jax.lax.dynamic_update_slice_in_dim(cache, prompt, row, axis=1)

        return jax.tree.map(put, cache, prompt)

    def _reshape(self, cache: KVCache, rows: jax.Array, window: int) -> KVCache:
        """A new cache of `rows` (indices int32 into those of `cache`) and another window."""

        def take(leaf: jax.Array) -> jax.Array:
            leaf = leaf[:, rows, :window]
            return jnp.pad(leaf, [(0, 0), (0, 0), (0, window - leaf.shape[2]), (0, 0), (0, 0)])

        return jax.tree.map(take, cache)
