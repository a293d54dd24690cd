"""Qwen3, dense (https://arxiv.org/abs/2505.09388): pre-norm decoder with grouped attention and query/key norms.

Layers of a deep model are stacked and scanned; those of a shallow one are unrolled, which runs faster and takes longer
to compile. A layer stores its keys and values in the cache before it reads it, so that a donated cache is updated in
place.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.layers.cached_attention import Pages, cached_attention
from skyrl.tx.layers.embedding import rows_of
from skyrl.tx.layers.linear import Linear
from skyrl.tx.layers.logprobs import Needs, Scores, projected_scores
from skyrl.tx.layers.lora import Lora
from skyrl.tx.layers.norm import RMSNorm
from skyrl.tx.layers.packed_attention import packed_attention
from skyrl.tx.layers.rope import Rotation, rope_theta
from skyrl.tx.models.types import MODELS, CausalLMOutput, KVCache, LoraTarget, ModelForCausalLM

if TYPE_CHECKING:
    from skyrl.tx.models.configs import ModelConfig


class Context(NamedTuple):
    """Inputs of every layer of one forward pass. A pytree."""

    rotation: Rotation
    positions: Int[Array, "batch tokens"]
    segments: Int[Array, "batch tokens"]
    """Tokens attend inside their own, where there is no cache."""


class Attention(nnx.Module):
    """Self-attention with norms on each head's query and key."""

    def __init__(self, config: "ModelConfig", dtype: jnp.dtype, rngs: nnx.Rngs):
        hidden, self.head_dim = config.hidden_size, config.head_dim
        query, key_value = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = Linear(hidden, query, bias=bias, dtype=dtype, rngs=rngs)
        self.k_proj = Linear(hidden, key_value, bias=bias, dtype=dtype, rngs=rngs)
        self.v_proj = Linear(hidden, key_value, bias=bias, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(query, hidden, bias=bias, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        context: Context,
        lora: Lora | None,
        cached: Pages | None,
    ) -> tuple[Float[Array, "batch tokens hidden"], Pages | None]:
        """The output, and the layer's cache with these tokens."""

        def heads(name: str) -> Float[Array, "batch tokens heads head_dim"]:
            return getattr(self, name)(x, lora and lora.at(name)).reshape(*x.shape[:2], -1, self.head_dim)

        query = context.rotation.apply(self.q_norm(heads("q_proj")))
        key = context.rotation.apply(self.k_norm(heads("k_proj")))
        value = heads("v_proj")
        if cached is None:
            mixed = packed_attention(query, key, value, context.segments)
        else:
            cached = cached.write(context.positions, key, value)
            mixed = cached_attention(query, cached, context.positions)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1), lora and lora.at("o_proj")), cached


class MLP(nnx.Module):
    """silu(gate) * up, projected down (SwiGLU)."""

    def __init__(self, config: "ModelConfig", dtype: jnp.dtype, rngs: nnx.Rngs):
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=False, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(hidden, inner, bias=False, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(inner, hidden, bias=False, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch tokens hidden"], lora: Lora | None
    ) -> Float[Array, "batch tokens hidden"]:
        """Apply to each token."""
        gate = self.gate_proj(x, lora and lora.at("gate_proj"))
        up = self.up_proj(x, lora and lora.at("up_proj"))
        return self.down_proj(jax.nn.silu(gate) * up, lora and lora.at("down_proj"))


class Layer(nnx.Module):
    """One decoder layer. In a model that scans its layers, parameters carry a leading [layers] axis."""

    def __init__(self, config: "ModelConfig", dtype: jnp.dtype, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, dtype, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        context: Context,
        lora: Lora | None,
        cached: Pages | None,
    ) -> tuple[Float[Array, "batch tokens hidden"], Pages | None]:
        """The residual stream after this layer, and its cache with these tokens."""
        attended, cached = self.self_attn(self.input_layernorm(x), context, lora and lora.at("self_attn"), cached)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x), lora and lora.at("mlp")), cached


@MODELS.register("Qwen3ForCausalLM")
class Qwen3ForCausalLM(ModelForCausalLM):
    """The decoder stack with its (tied or own) vocabulary projection."""

    weight_names: ClassVar[dict[tuple[str, ...], str]] = {
        ("embed_tokens",): "model.embed_tokens.weight",
        ("layers", "input_layernorm", "scale"): "model.layers.{layer}.input_layernorm.weight",
        ("layers", "self_attn", "q_proj", "kernel"): "model.layers.{layer}.self_attn.q_proj.weight",
        ("layers", "self_attn", "q_proj", "bias"): "model.layers.{layer}.self_attn.q_proj.bias",
        ("layers", "self_attn", "k_proj", "kernel"): "model.layers.{layer}.self_attn.k_proj.weight",
        ("layers", "self_attn", "k_proj", "bias"): "model.layers.{layer}.self_attn.k_proj.bias",
        ("layers", "self_attn", "v_proj", "kernel"): "model.layers.{layer}.self_attn.v_proj.weight",
        ("layers", "self_attn", "v_proj", "bias"): "model.layers.{layer}.self_attn.v_proj.bias",
        ("layers", "self_attn", "o_proj", "kernel"): "model.layers.{layer}.self_attn.o_proj.weight",
        ("layers", "self_attn", "o_proj", "bias"): "model.layers.{layer}.self_attn.o_proj.bias",
        ("layers", "self_attn", "q_norm", "scale"): "model.layers.{layer}.self_attn.q_norm.weight",
        ("layers", "self_attn", "k_norm", "scale"): "model.layers.{layer}.self_attn.k_norm.weight",
        ("layers", "post_attention_layernorm", "scale"): "model.layers.{layer}.post_attention_layernorm.weight",
        ("layers", "mlp", "gate_proj", "kernel"): "model.layers.{layer}.mlp.gate_proj.weight",
        ("layers", "mlp", "up_proj", "kernel"): "model.layers.{layer}.mlp.up_proj.weight",
        ("layers", "mlp", "down_proj", "kernel"): "model.layers.{layer}.mlp.down_proj.weight",
        ("norm", "scale"): "model.norm.weight",
        ("unembed",): "lm_head.weight",
    }

    def __init__(self, config: "ModelConfig", *, dtype: jnp.dtype, rngs: nnx.Rngs):
        _refuse_unimplemented(config)
        self.config = config
        embed = nnx.initializers.normal(0.02)
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nnx.Param(embed(rngs.params(), vocabulary, dtype))

        @nnx.split_rngs(splits=config.num_hidden_layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> Layer:
            return Layer(config, dtype, rngs)

        if config.unroll_layers:
            self.layers = nnx.List([Layer(config, dtype, rngs) for _ in range(config.num_hidden_layers)])
        else:
            self.layers = stacked(rngs)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        tied = config.tie_word_embeddings
        self.unembed = None if tied else nnx.Param(embed(rngs.params(), vocabulary, dtype))

    @staticmethod
    def lora_targets(config: "ModelConfig") -> list[LoraTarget]:
        """All seven projections of the layers, and the vocabulary projection."""
        hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
        query, key_value = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        attention, mlp = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."
        return [
            LoraTarget(("layers", "self_attn", "q_proj"), attention + "q_proj", "attn", hidden, query, layers),
            LoraTarget(("layers", "self_attn", "k_proj"), attention + "k_proj", "attn", hidden, key_value, layers),
            LoraTarget(("layers", "self_attn", "v_proj"), attention + "v_proj", "attn", hidden, key_value, layers),
            LoraTarget(("layers", "self_attn", "o_proj"), attention + "o_proj", "attn", query, hidden, layers),
            LoraTarget(("layers", "mlp", "gate_proj"), mlp + "gate_proj", "mlp", hidden, inner, layers),
            LoraTarget(("layers", "mlp", "up_proj"), mlp + "up_proj", "mlp", hidden, inner, layers),
            LoraTarget(("layers", "mlp", "down_proj"), mlp + "down_proj", "mlp", inner, hidden, layers),
            LoraTarget(("lm_head",), "lm_head", "unembed", hidden, config.vocab_size, None),
        ]

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
        """See `ModelForCausalLM.__call__`."""
        config = self.config
        lora = None if adapter is None else Lora.of(adapter, adapter_index)
        context = Context(
            rotation=Rotation.at(positions, config.head_dim, rope_theta(config)),
            positions=positions,
            segments=jnp.zeros_like(positions) if segment_ids is None else segment_ids,
        )
        embedded = rows_of(self.embed_tokens[...], input_ids)
        # What is computed again is freed in between only if layers are a loop: else the compiler merges both times.
        looped = kv_cache is None and self.config.gradient_checkpointing
        run = self._unrolled if isinstance(self.layers, nnx.List) and not looped else self._scanned
        x, hidden, kv_cache = run(embedded, context, lora, kv_cache, output_hidden_states)
        x = self.norm(x)
        return CausalLMOutput(
            last_hidden_state=x,
            kv_cache=kv_cache,
            hidden_states=None if hidden is None else [embedded, *hidden[:-1], x],
        )

    def _unrolled(
        self, x: Array, context: Context, lora: Lora | None, cache: KVCache | None, output_hidden_states: bool
    ) -> tuple[Array, Sequence[Array] | Array | None, KVCache | None]:
        """The residual stream after all layers and after each (where asked), and the updated cache."""
        hidden, written = [], []
        assert isinstance(self.layers, nnx.List)
        for i, layer in enumerate(self.layers):
            cached = None if cache is None else Pages(cache.keys[i], cache.values[i], cache.table)
            x, cached = layer(x, context, lora and lora.of_layer(i), cached)
            written.append(cached)
            if output_hidden_states:
                hidden.append(x)
        if cache is not None:
            cache = cache._replace(keys=tuple(p.keys for p in written), values=tuple(p.values for p in written))
        return x, hidden if output_hidden_states else None, cache

    def _scanned(
        self, x: Array, context: Context, lora: Lora | None, cache: KVCache | None, output_hidden_states: bool
    ) -> tuple[Array, Sequence[Array] | Array | None, KVCache | None]:
        """As `_unrolled`. The cache is carried along whole, so that it is updated in place."""
        graph, parameters = self._stacked()
        layers = self.config.num_hidden_layers
        pages = 0 if cache is None else cache.keys[0].shape[0] // layers

        def body(carry: tuple[Array, KVCache | None], inputs: tuple[Any, Any, Array]) -> tuple[Any, Any]:
            (x, cache), (parameters, weights, layer) = carry, inputs
            layer_lora = None if lora is None else lora._replace(weights=weights)
            cached = None if cache is None else Pages(cache.keys[0], cache.values[0], cache.table + layer * pages)
            x, cached = nnx.merge(graph, parameters)(x, context, layer_lora, cached)
            if cache is not None and cached is not None:
                cache = cache._replace(keys=(cached.keys,), values=(cached.values,))
            return (x, cache), (x if output_hidden_states else None)

        if mode := self.config.gradient_checkpointing:
            products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if mode == "selective" else None
            body = jax.checkpoint(body, prevent_cse=False, policy=products)
        inputs = parameters, lora and lora.weights["layers"], jnp.arange(layers)
        (x, cache), hidden = jax.lax.scan(body, (x, cache), inputs)
        return x, hidden, cache

    def _stacked(self) -> tuple[Any, Any]:
        """Definition of a layer, and the parameters of all with a leading [layers] axis."""
        if not isinstance(self.layers, nnx.List):
            return nnx.split(self.layers)
        graphs, parameters = zip(*map(nnx.split, self.layers), strict=True)
        return graphs[0], jax.tree.map(lambda *leaves: jnp.stack(leaves), *parameters)

    def compute_logits(
        self,
        hidden: Float[Array, "*leading hidden"],
        adapter: Adapter | None = None,
        adapter_index: Int[Array, "*leading"] | None = None,
    ) -> Float[Array, "*leading vocab"]:
        """See `ModelForCausalLM.compute_logits`."""
        slots = None if adapter_index is None else adapter_index.reshape(-1)
        lora = None if adapter is None else Lora.of(adapter, slots).at("lm_head")
        rows = hidden.reshape(-1, hidden.shape[-1])
        return _logits(self._vocabulary, lora, rows).reshape(*hidden.shape[:-1], -1)

    @property
    def _vocabulary(self) -> Float[Array, "vocab hidden"]:
        return (self.embed_tokens if self.unembed is None else self.unembed)[...]

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
        """See `ModelForCausalLM.target_scores`."""
        lora = None if adapter is None else Lora.of(adapter, None).at("lm_head")
        size = self.config.loss_chunk_size if chunk_size is None else chunk_size
        needs = Needs.all(len(targets)) if needs is None else needs
        vocabulary = self._vocabulary
        if train_base:
            project, trainable = (lambda both, states: _logits(both[0], both[1], states)), (vocabulary, lora)
        else:
            project, trainable = (lambda lora, states: _logits(vocabulary, lora, states)), lora
        return projected_scores(project, trainable, hidden, targets, needs, size, temperature, entropy)


def _logits(
    vocabulary: Float[Array, "vocab hidden"], lora: Lora | None, hidden: Float[Array, "tokens hidden"]
) -> Float[Array, "tokens vocab"]:
    logits = jnp.einsum("nd,vd->nv", hidden, vocabulary, preferred_element_type=jnp.float32)
    return logits if lora is None else logits + lora.delta(hidden)


def _refuse_unimplemented(config: "ModelConfig") -> None:
    """Raise ValueError for options whose silent omission would give wrong results."""
    rope_theta(config)
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    if kinds or getattr(config, "use_sliding_window", False):
        raise ValueError(
            f"layer_types has {', '.join(kinds) or 'sliding_attention'}: sliding-window attention is not implemented "
            "(known: full_attention); use another base model"
        )
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act={config.hidden_act!r} is not implemented (known: silu); use another base model")
    if config.mhc_expansion_rate > 1:
        raise ValueError(
            f"mhc_expansion_rate={config.mhc_expansion_rate}: several residual streams are not implemented; set it to 1"
        )
