"""The compiled programs of sampling: reading a prompt by chunks, one decode step of all rows, moving cache rows.

Pure functions of (base, bank, cache, data). Shapes come from `CacheShapes` and `CHUNKS`, everything a request can
choose is data, so the number of programs is bounded and small; `compiled` counts them. The backend sets the matmul
precision around all its programs, so that sampler and trainer compute alike.
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
from skyrl.tx.sampling import sample_tokens, uniforms

CHUNKS = (32, 128, 512)
"""Tokens of a prompt read at once. Windows are multiples of the chunks used in them, so a chunk always has room."""

_SCORED_AT_ONCE = 32
"""Prompt tokens whose logits over the whole vocabulary exist at the same time."""


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


class PromptScores(NamedTuple):
    """Log-probabilities (arrays in nats, float32) of the tokens after each token of a chunk. A pytree."""

    logprobs: Any
    """`[chunk]`, of the token that did follow."""
    top_ids: Any
    """int32 `[chunk, k]`, most likely first."""
    top_logprobs: Any
    """`[chunk, k]`."""


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
        self.prefill_scored = self._program(self._prefill_scored, donate="cache", static="k")
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

    def _read(
        self, base: Any, bank: Adapter, cache: KVCache, slot: jax.Array, tokens: jax.Array, start: jax.Array
    ) -> tuple[Any, Adapter, Any]:
        model, adapter = nnx.merge(self._graphdef, base), read_slot(bank, slot)
        positions = (start + jnp.arange(tokens.shape[0], dtype=jnp.int32))[None]
        return model, adapter, model(tokens[None], positions=positions, adapter=adapter, kv_cache=cache)

    def _prefill(
        self, base: Any, bank: Adapter, cache: KVCache, slot: jax.Array, tokens: jax.Array, start: jax.Array
    ) -> KVCache:
        """Read `tokens` int32 `[chunk]` into the one row of `cache`, from position `start` on."""
        return self._read(base, bank, cache, slot, tokens, start)[2].kv_cache

    def _prefill_scored(
        self,
        base: Any,
        bank: Adapter,
        cache: KVCache,
        slot: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        targets: jax.Array,
        k: int,
    ) -> tuple[KVCache, PromptScores]:
        """As `prefill`, and the scores of `targets` int32 `[chunk]`, the token after each, and of the k best."""
        model, adapter, output = self._read(base, bank, cache, slot, tokens, start)

        def score(part: tuple[jax.Array, jax.Array]) -> PromptScores:
            hidden, target = part
            logprobs = jax.nn.log_softmax(model.compute_logits(hidden, adapter=adapter), axis=-1)
            top_logprobs, top_ids = jax.lax.top_k(logprobs, k) if k else (logprobs[:, :0], logprobs[:, :0])
            followed = jnp.take_along_axis(logprobs, target[:, None], axis=-1)[:, 0]
            return PromptScores(followed, top_ids.astype(jnp.int32), top_logprobs)

        hidden = output.last_hidden_state[0]
        parts = hidden.reshape(-1, _SCORED_AT_ONCE, hidden.shape[-1]), targets.reshape(-1, _SCORED_AT_ONCE)
        scores = jax.lax.map(score, parts)
        return output.kv_cache, jax.tree.map(lambda x: x.reshape(len(tokens), *x.shape[2:]), scores)

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
