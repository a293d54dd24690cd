"""One decoder layer, built from the design of its group.

A layer writes its keys and values to the cache before it reads the cache, so that a donated cache is updated in place.
Shapes of parameters come from the table (`skyrl.tx.design.parameters`), as nested dictionaries.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from skyrl.tx.design.design import Attention, DeltaNet, Design, Experts, LatentAttention, LayerGroup
from skyrl.tx.layers.attention import attention
from skyrl.tx.layers.cached_attention import Pages
from skyrl.tx.layers.connector import Connector, PlainResidual
from skyrl.tx.layers.linear import Linear
from skyrl.tx.layers.lora import Lora
from skyrl.tx.layers.norm import RMSNorm, normalised
from skyrl.tx.layers.rope import Rotation
from skyrl.tx.models.delta_net import DeltaNetLayer
from skyrl.tx.models.experts import ExpertsLayer
from skyrl.tx.models.gated import GatedLayer
from skyrl.tx.models.latent import LatentAttentionLayer
from skyrl.tx.models.types import Cached

Hidden = Float[Array, "batch tokens hidden"]
Stream = Float[Array, "batch tokens *streams hidden"]
"""One or several residual streams."""
Shapes = dict[str, Any]
"""Shapes of a module's parameters, with a nested dictionary for each submodule."""


class Context(NamedTuple):
    """Inputs of a layer other than the residual stream. A pytree."""

    rotation: Rotation
    window: int | Int[Array, ""] | None
    positions: Int[Array, "batch tokens"]
    segments: Int[Array, "batch tokens"]
    """Segment ids. Without a cache, tokens attend within their segment. With a cache, segment -1 marks padding."""
    longest_first: bool = False
    """See `attention`. Not an array."""
    windows: tuple[int, ...] = ()
    """All possible values of `window`, if it is an array. Not arrays."""


class AttentionLayer(nnx.Module):
    """Self-attention."""

    def __init__(self, design: Attention, shapes: Shapes, norm: Any, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.design = design
        self.q_proj = Linear(shapes["q_proj"], dtype, rngs)
        self.k_proj = Linear(shapes["k_proj"], dtype, rngs)
        self.v_proj = Linear(shapes["v_proj"], dtype, rngs)
        self.o_proj = Linear(shapes["o_proj"], dtype, rngs)
        if design.head_norms or design.whole_norms:
            self.q_norm, self.k_norm = norm(shapes["q_norm"]), norm(shapes["k_norm"])

    def __call__(
        self, x: Hidden, context: Context, lora: Lora | None, cached: Pages | None
    ) -> tuple[Hidden, Pages | None]:
        """Return (output, cache of the layer with these tokens)."""
        design = self.design

        def heads(name: str, norm: str | None = None) -> Float[Array, "batch tokens heads head_dim"]:
            made = getattr(self, name)(x, lora and lora.at(name))
            if norm is not None and design.whole_norms:
                made = getattr(self, norm)(made)
            return made.reshape(*x.shape[:2], -1, design.head_dim)

        query, key, gate = heads("q_proj", "q_norm"), heads("k_proj", "k_norm"), None
        if design.gated:
            query, gate = jnp.split(query.reshape(*x.shape[:2], design.heads, -1), 2, axis=-1)
        if design.head_norms:
            query, key = self.q_norm(query), self.k_norm(key)
        mixed, cached = attention(
            context.rotation.apply(query),
            context.rotation.apply(key),
            heads("v_proj"),
            positions=context.positions,
            segments=context.segments,
            pages=cached,
            scale=design.scale,
            window=context.window,
            windows=context.windows,
            softcap=design.softcap,
            longest_first=context.longest_first,
        )
        if gate is not None:
            mixed = mixed * jax.nn.sigmoid(gate)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1), lora and lora.at("o_proj")), cached


class Layer(nnx.Module):
    """Attention and feed-forward. In a model with scanned layers, parameters have a leading [layers] axis."""

    def __init__(self, group: LayerGroup, design: Design, shapes: Shapes, dtype: jnp.dtype, rngs: nnx.Rngs):
        def norm(shapes: Shapes) -> RMSNorm:
            return RMSNorm(*shapes["scale"], eps=design.norm_eps, dtype=dtype, offset=design.norm_offset)

        self.output_norms, self.input_norms, self.norm_eps = group.output_norms, group.input_norms, design.norm_eps
        self.mixer = "linear_attn" if isinstance(group.attention, DeltaNet) else "self_attn"
        if self.input_norms:
            self.input_layernorm = norm(shapes["input_layernorm"])
        if isinstance(group.attention, DeltaNet):
            self.linear_attn = DeltaNetLayer(group.attention, shapes["linear_attn"], design.norm_eps, dtype, rngs)
        elif isinstance(group.attention, LatentAttention):
            self.self_attn = LatentAttentionLayer(group.attention, shapes["self_attn"], dtype, rngs)
        else:
            self.self_attn = AttentionLayer(group.attention, shapes["self_attn"], norm, dtype, rngs)
        self.post_attention_layernorm = norm(shapes["post_attention_layernorm"])
        if self.output_norms:
            if self.input_norms:
                self.pre_feedforward_layernorm = norm(shapes["pre_feedforward_layernorm"])
            self.post_feedforward_layernorm = norm(shapes["post_feedforward_layernorm"])
        kind = ExpertsLayer if isinstance(group.feed_forward, Experts) else GatedLayer
        self.mlp = kind(group.feed_forward, shapes["mlp"], dtype, rngs)  # pyright: ignore[reportArgumentType] (its own)

    def __call__(
        self, x: Stream, context: Context, lora: Lora | None, cached: Cached | None
    ) -> tuple[Stream, Cached | None]:
        """Return (residual stream after this layer, cache of the layer with these tokens)."""
        mixer, own = getattr(self, self.mixer), lora and lora.at(self.mixer)
        norm = self.input_layernorm if self.input_norms else None
        residual, read = self._connection("attn_connector", x, lora, norm)
        attended, cached = mixer(read, context, own, cached)
        x = residual.write(x, self.post_attention_layernorm(attended) if self.output_norms else attended)
        if not self.output_norms:
            norm = self.post_attention_layernorm
        elif self.input_norms:
            norm = self.pre_feedforward_layernorm
        residual, read = self._connection("mlp_connector", x, lora, norm)
        added = self.mlp(read, lora and lora.at("mlp"))
        return residual.write(x, self.post_feedforward_layernorm(added) if self.output_norms else added), cached

    def _connection(
        self, name: str, x: Stream, lora: Lora | None, norm: RMSNorm | None
    ) -> tuple[PlainResidual | Connector, Hidden]:
        """Return (connection of a sub-block with the residual streams, input of the sub-block).

        If the sub-block has no norm, its connector normalises the streams without weights.
        """
        residual = PlainResidual()
        if x.ndim == 4:
            assert lora is not None, "several streams are those of an adapter"
            of_each = norm or (lambda x: normalised(x, self.norm_eps).astype(x.dtype))
            residual = Connector.of(x, lora.at(name), of_each)
        read = residual.read(x)
        return residual, read if norm is None else norm(read)
