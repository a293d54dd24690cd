"""Interfaces of models, adapters and caches for their callers.

A model is an NNX module with base weights only. Everything that differs per tenant or call (adapter, cache) is an
argument, so that the hot path consists of pure functions: split the module once, and merge it inside `jax.jit`.

To add an architecture, add a file with its design to `skyrl/tx/families`.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from skyrl.tx.design.connectors import CONNECTORS
from skyrl.tx.design.design import DeltaNet, Mixer
from skyrl.tx.families import design_of
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.layers.cached_attention import Pages
from skyrl.tx.layers.logprobs import Needs, Scores
from skyrl.tx.models.recurrence import States

if TYPE_CHECKING:  # transformers imports torch if installed, which array code does not need
    from skyrl.tx.models.configs import ModelConfig


PAGE_SIZE = 64
"""Number of tokens per page."""

Cached = Pages | States
"""Part of a cache for one layer, or for all layers of a group."""

Pool = tuple[tuple[Array, ...], tuple[Array, ...], tuple[tuple[Array, Array], ...]]
"""`keys`, `values` and `states` of a `KVCache`."""


class KVCache(NamedTuple):
    """Paged cache of keys (after norm and RoPE) and values, or latents of latent attention. A pytree.

    The token at position p of row b is entry p % page_size of page `table[b, p // page_size]`. Rows may share pages
    that none of them writes to. Positions past the end of the table are not stored. Recurrent layers have states
    instead: the state of row b, after its last token, is in slot `slots[b]`.
    """

    keys: tuple[Float[Array, "pages kv_heads key_dim page_size"], ...]
    """One array per layer with pages. If layers are scanned, one array per group: all pages of its first layer, then
    all pages of its second layer, and so on.

    Positions are the last axis, so that the scores of one query are computed for vectors of positions.
    """
    values: tuple[Float[Array, "pages kv_heads page_size value_dim"], ...]
    """Values, in the same layout as `keys`."""
    table: Int[Array, "batch blocks"]
    states: tuple[tuple[Float[Array, "slots before channels"], Float[Array, "slots heads key_dim value_dim"]], ...] = ()
    """(window, memory) of recurrent layers: one pair per layer or group, as for `keys`."""
    slots: Int[Array, "batch"] | None = None
    """Slot of each row's state. None for models without recurrent layers."""

    @classmethod
    def zeros(
        cls, config: "ModelConfig", batch: int, capacity: int, dtype: DTypeLike, page_size: int = PAGE_SIZE
    ) -> "KVCache":
        """Return an empty cache for `batch` rows of at most `capacity` tokens. Rows share no pages."""
        blocks = -(-capacity // page_size)
        table = jnp.arange(batch * blocks, dtype=jnp.int32).reshape(batch, blocks)
        pool = cls.pool(config, batch * blocks, dtype, page_size, states=batch)
        return cls.of(pool, table, jnp.arange(batch, dtype=jnp.int32))

    @staticmethod
    def pool(config: "ModelConfig", pages: int, dtype: DTypeLike, page_size: int = PAGE_SIZE, states: int = 0) -> Pool:
        """Allocate `pages` pages and `states` slots per layer, filled with zeros."""
        keys, values, of_states = [], [], []
        for part in cache_parts(config):
            layers, d = part.layers, part.mixer
            if isinstance(d, DeltaNet):
                window = jnp.zeros((layers * states, d.width - 1, d.channels), dtype)
                memory = jnp.zeros((layers * states, d.value_heads, d.key_dim, d.value_dim), jnp.float32)
                of_states.append((window, memory))
                continue
            kv_heads, key_dim, value_dim = d.cached
            keys.append(jnp.zeros((layers * pages, kv_heads, key_dim, page_size), dtype))
            values.append(jnp.zeros((layers * pages, kv_heads, page_size, value_dim), dtype))
        return tuple(keys), tuple(values), tuple(of_states)

    @classmethod
    def of(cls, pool: Pool, table: Array, slots: Array) -> "KVCache":
        """Return the cache of rows with these pages and slots of a pool."""
        keys, values, states = pool
        return cls(keys, values, table, states, slots)

    @property
    def as_pool(self) -> Pool:
        """Arrays of the cache, as a pool for `of`."""
        return self.keys, self.values, self.states

    def by_group(self, config: "ModelConfig") -> dict[str, list[Cached]]:
        """Return the parts of each group: one per layer, or one for all layers if they are scanned."""
        pages, states = zip(self.keys, self.values, strict=True), iter(self.states)
        parts: dict[str, list[Cached]] = {}
        for part in cache_parts(config):
            if isinstance(part.mixer, DeltaNet):
                assert self.slots is not None, "a cache of a model with states says whose they are"
                cached = States(*next(states), self.slots)
            else:
                cached = Pages(*next(pages), self.table)
            parts.setdefault(part.group, []).append(cached)
        return parts

    def with_parts(self, parts: Iterable[list[Cached]]) -> "KVCache":
        """Return the cache with the arrays of `parts`, which are in the order of `by_group`."""
        flat = [cached for some in parts for cached in some]
        return self._replace(
            keys=tuple(cached.keys for cached in flat if isinstance(cached, Pages)),
            values=tuple(cached.values for cached in flat if isinstance(cached, Pages)),
            states=tuple((cached.window, cached.memory) for cached in flat if isinstance(cached, States)),
        )


class CachePart(NamedTuple):
    """Description of one pair of arrays of a `KVCache`."""

    group: str
    """Name of the group of layers."""
    layers: int
    """Number of layers in the arrays, one after another."""
    mixer: Mixer


def cache_parts(config: "ModelConfig") -> list[CachePart]:
    """Describe the pairs of arrays of a cache (keys and values, or states), in their order."""
    parts = []
    for group in design_of(config).groups:
        layers = len(group.kinds)
        own = CachePart(group.name, 1 if config.unroll_layers else layers, group.attention)
        parts += [own] * (layers if config.unroll_layers else 1)
    return parts


class CausalLMOutput(NamedTuple):
    """Result of a forward pass."""

    last_hidden_state: Float[Array, "batch tokens hidden"]
    """Hidden states after the final norm."""
    kv_cache: KVCache | None = None
    """Updated cache; None in training."""
    hidden_states: list[Float[Array, "batch tokens hidden"]] | None = None
    """Hidden states: the embeddings, then the output of each layer, the last one after the final norm. With several
    residual streams, their mean. None if not requested."""


class ModelForCausalLM(nnx.Module):
    """Interface of a decoder with a vocabulary projection. `skyrl.tx.models.decoder` is the only implementation."""

    config: "ModelConfig"

    def __init__(self, config: "ModelConfig", *, dtype: jnp.dtype, rngs: nnx.Rngs):
        raise NotImplementedError

    def get_model_config(self) -> "ModelConfig":
        """Return the configuration of the model."""
        return self.config

    def is_lora_param(self, path: tuple[Any, ...], _value: Any) -> bool:
        """Return True if a parameter belongs to the adapter rather than to the base.

        These are parameters below `lora_A` and `lora_B` and, with several residual streams, parameters of connectors.
        """
        trainable = {"lora_A", "lora_B"}
        if self.config.mhc_expansion_rate > 1:
            trainable |= CONNECTORS.keys()
        return any(getattr(part, "key", part) in trainable for part in path)

    def __call__(
        self,
        input_ids: Int[Array, "batch tokens"],
        *,
        positions: Int[Array, "batch tokens"],
        segment_ids: Int[Array, "batch tokens"] | None = None,
        adapter: Adapter | None = None,
        adapter_index: Int[Array, "batch"] | None = None,
        kv_cache: KVCache | None = None,
        output_hidden_states: bool = False,
        longest_first: bool = False,
    ) -> CausalLMOutput:
        """Compute the hidden states of all tokens.

        Without a cache, attention is causal within equal `segment_ids` (None: each row is one segment), and positions
        restart in each segment. Segment -1 is padding, whose output is meaningless but finite. With a cache, token t of
        row b is stored at position `positions[b, t]` (dropped if past the end of the table), and attends to all earlier
        positions and its own. Tokens of segment -1, which are the last ones of a row, are padding. `longest_first`
        says that rows with higher positions precede others, so that pages of long rows are read by themselves.

        Without `adapter_index`, all rows use `adapter`. With it, `adapter` is a bank, and row b uses slot
        `adapter_index[b]`, or no adapter if that is negative.
        """
        raise NotImplementedError

    def compute_logits(
        self,
        hidden: Float[Array, "*leading hidden"],
        adapter: Adapter | None = None,
        adapter_index: Int[Array, "*leading"] | None = None,
    ) -> Float[Array, "*leading vocab"]:
        """Compute float32 logits of final hidden states. `adapter_index` has one slot per hidden state."""
        raise NotImplementedError

    def target_scores(
        self,
        hidden: Float[Array, "tokens hidden"],
        targets: Int[Array, "tokens K"],
        *,
        adapter: Adapter | None = None,
        needs: Needs | None = None,
        chunk_size: int | None = None,
        temperature: Float[Array, "tokens"] | None = None,
        entropy: bool = False,
        train_base: bool = False,
    ) -> Scores:
        """Compute float32 log-probabilities (nats) of K targets per token, for all tokens or those in `needs`.

        Processes `chunk_size` tokens at a time, so that logits never exceed `[chunk_size, vocab]`. 0: all tokens at
        once; None: the configured `loss_chunk_size`. Logits are divided by `temperature`, if given. With `entropy`, the
        entropy of each distribution is returned, too. The base weights get a gradient only with `train_base`.
        """
        raise NotImplementedError
