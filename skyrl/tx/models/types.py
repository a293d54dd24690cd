"""Types of models, adapters and caches for the code that drives them.

A model is an NNX module that holds base weights only. Everything that differs per tenant or per call (adapter, cache)
is an argument, so that the hot path is pure functions: split the module once, merge it inside `jax.jit`.

Adding an architecture means one module with a `ModelForCausalLM` subclass, registered in `MODELS` under its Hugging
Face architecture name, and its import in `skyrl/tx/models/__init__.py`.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.layers.logprobs import Needs, Scores
from skyrl.utils.registry import Registry

if TYPE_CHECKING:  # transformers loads torch where that is installed, which array code has no use for
    from skyrl.tx.models.configs import ModelConfig


PAGE_SIZE = 64
"""Tokens of a page of keys and values."""


class KVCache(NamedTuple):
    """Keys (after norm and RoPE) and values of past tokens, in pages. A pytree.

    The token at position p of row b is entry p % page_size of page `table[b, p // page_size]`. Rows may share pages
    that none of them writes to. Positions past the table are not stored.
    """

    keys: tuple[Float[Array, "pages kv_heads head_dim page_size"], ...]
    """One array per layer; a single one with the pages of all layers, one layer after the other, if layers are scanned.

    Positions are the last axis, so that scores of one query are computed by vectors of positions.
    """
    values: tuple[Float[Array, "pages kv_heads page_size head_dim"], ...]
    """As `keys`."""
    table: Int[Array, "batch blocks"]

    @classmethod
    def zeros(
        cls, config: "ModelConfig", batch: int, capacity: int, dtype: DTypeLike, page_size: int = PAGE_SIZE
    ) -> "KVCache":
        """An empty cache for `batch` rows of at most `capacity` tokens, each with pages of its own."""
        blocks = -(-capacity // page_size)
        table = jnp.arange(batch * blocks, dtype=jnp.int32).reshape(batch, blocks)
        return cls(*cls.pool(config, batch * blocks, dtype, page_size), table)

    @staticmethod
    def pool(
        config: "ModelConfig", pages: int, dtype: DTypeLike, page_size: int = PAGE_SIZE
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """`keys` and `values` of so many pages per layer, all zeros."""
        text = config.get_text_config()
        layers, heads, width = text.num_hidden_layers, text.num_key_value_heads, text.head_dim
        arrays, pages = (layers, pages) if config.unroll_layers else (1, layers * pages)
        return (
            tuple(jnp.zeros((pages, heads, width, page_size), dtype) for _ in range(arrays)),
            tuple(jnp.zeros((pages, heads, page_size, width), dtype) for _ in range(arrays)),
        )


class CausalLMOutput(NamedTuple):
    """Result of a forward pass."""

    last_hidden_state: Float[Array, "batch tokens hidden"]
    """After the final norm."""
    kv_cache: KVCache | None = None
    """The updated cache; None in training."""
    hidden_states: list[Float[Array, "batch tokens hidden"]] | None = None
    """When asked for: the embeddings, then the output of each layer, the last one after the final norm."""


class LoraTarget(NamedTuple):
    """A linear map that can be adapted."""

    path: tuple[str, ...]
    """Where its pair is in `Adapter.weights`."""
    module: str
    """Name of the module in Hugging Face's model; "{layer}" marks one per layer."""
    group: Literal["attn", "mlp", "unembed"]
    """Switch of LoraConfig's train_* that selects it."""
    in_features: int
    out_features: int
    layers: int | None
    """Length of the stacked axis; None outside the layers."""


class ModelForCausalLM(nnx.Module):
    """A decoder with a vocabulary projection. `skyrl.tx.models.qwen3` is the example to follow."""

    weight_names: ClassVar[dict[tuple[str, ...], str]]
    """Hugging Face tensor name of each parameter path; "{layer}" marks parameters stacked over layers.

    Parameters called "kernel" are `[in, out]` here and `[out, in]` there.
    """

    config: "ModelConfig"

    def __init__(self, config: "ModelConfig", *, dtype: jnp.dtype, rngs: nnx.Rngs):
        raise NotImplementedError

    def get_model_config(self) -> "ModelConfig":
        """The configuration that the model was made with."""
        return self.config

    def is_lora_param(self, path: tuple[Any, ...], _value: Any) -> bool:
        """Whether a parameter belongs to the adapter (rather than the base).

        True below `lora_A` and `lora_B`, and with several residual streams for their connectors too.
        """
        trainable = {"lora_A", "lora_B"}
        if self.config.mhc_expansion_rate > 1:
            trainable |= {"attn_connector", "mlp_connector"}
        return any(getattr(part, "key", part) in trainable for part in path)

    @staticmethod
    def lora_targets(config: "ModelConfig") -> list[LoraTarget]:
        """Every linear map of this architecture that an adapter covers."""
        raise NotImplementedError

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
    ) -> CausalLMOutput:
        """Hidden states of all tokens.

        Without a cache, attention is causal inside equal `segment_ids` (None: each row is one segment) and positions
        restart in each segment; segment -1 is padding, whose output is meaningless but finite. With a cache, token t
        of row b is stored at position `positions[b, t]` (past the table: nowhere), and attends to what is stored at
        all earlier positions and at its own.

        Without `adapter_index`, `adapter` is a single one for all rows. With it, `adapter` is a bank and row b uses
        slot `adapter_index[b]`, none if that is negative.
        """
        raise NotImplementedError

    def compute_logits(
        self,
        hidden: Float[Array, "*leading hidden"],
        adapter: Adapter | None = None,
        adapter_index: Int[Array, "*leading"] | None = None,
    ) -> Float[Array, "*leading vocab"]:
        """float32 logits of final hidden states. `adapter_index` has one slot per hidden state."""
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
        """float32 log-probabilities (nats) of K targets per token: of all tokens, or of those that `needs` names.

        `chunk_size` tokens at a time, so that logits never exceed `[chunk_size, vocab]`; 0 takes all tokens at once,
        None the configured `loss_chunk_size`. Logits are divided by `temperature`, if there is one. With `entropy` that
        of each distribution comes too. The model's own weights get a gradient only with `train_base`.
        """
        raise NotImplementedError


MODELS: Registry[type[ModelForCausalLM]] = Registry("model architecture")
"""By Hugging Face architecture name (`architectures` of config.json)."""
