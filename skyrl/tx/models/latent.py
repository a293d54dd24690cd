"""Multi-head latent attention (MLA). The cache has a latent and a rotated key per token.

Without a cache, keys and values are computed from the latent, followed by ordinary attention. With a cache, the
projection to keys and values is applied to queries and to attention outputs instead ("absorbed", DeepSeek-V2,
https://arxiv.org/abs/2405.04434, section 2.1.2): all heads are then queries of one key/value head, whose key is the
latent and the rotated key, and whose value is the latent. Computed keys and values stay float32, because absorbed ones
are never rounded: otherwise a bfloat16 model would score fresh samples differently than it sampled them.
"""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from skyrl.tx.design.design import LatentAttention
from skyrl.tx.layers.attention import attention
from skyrl.tx.layers.cached_attention import Pages
from skyrl.tx.layers.linear import Linear, product
from skyrl.tx.layers.lora import Lora
from skyrl.tx.layers.norm import RMSNorm

if TYPE_CHECKING:  # a layer has attention
    from skyrl.tx.models.layer import Context

Hidden = Float[Array, "batch tokens hidden"]


class LatentAttentionLayer(nnx.Module):
    """Multi-head latent attention."""

    def __init__(self, design: LatentAttention, shapes: dict[str, Any], dtype: jnp.dtype, rngs: nnx.Rngs):
        def norm(name: str) -> RMSNorm:
            return RMSNorm(*shapes[name]["scale"], eps=design.norm_eps, dtype=dtype)

        self.design = design
        if design.query_latent is None:
            self.q_proj = Linear(shapes["q_proj"], dtype, rngs)
        else:
            self.q_a_proj = Linear(shapes["q_a_proj"], dtype, rngs)
            self.q_a_layernorm = norm("q_a_layernorm")
            self.q_b_proj = Linear(shapes["q_b_proj"], dtype, rngs)
        self.kv_a_proj_with_mqa = Linear(shapes["kv_a_proj_with_mqa"], dtype, rngs)
        self.kv_a_layernorm = norm("kv_a_layernorm")
        self.kv_b_proj = Linear(shapes["kv_b_proj"], dtype, rngs)
        self.o_proj = Linear(shapes["o_proj"], dtype, rngs)

    def __call__(
        self, x: Hidden, context: "Context", lora: Lora | None, cached: Pages | None
    ) -> tuple[Hidden, Pages | None]:
        """Return (output, cache of the layer with these tokens)."""
        design, rotation = self.design, context.rotation
        plain, rotated = jnp.split(self._query(x, lora), [design.plain_dim], axis=-1)
        rotated = rotation.apply(rotated, design.interleaved)
        stored = self.kv_a_proj_with_mqa(x, lora and lora.at("kv_a_proj_with_mqa"))
        latent, shared = jnp.split(stored, [design.latent], axis=-1)
        latent, shared = self.kv_a_layernorm(latent), rotation.apply(shared[:, :, None], design.interleaved)
        own = lora and lora.at("kv_b_proj")
        absorbed = None if cached is None else _Absorbed(self.kv_b_proj.weight[...].T, design, own, len(x))
        if absorbed is None:
            plain = plain.astype(jnp.float32)
            key, value = self._keys_and_values(latent, own)
            key = jnp.concatenate([key, jnp.broadcast_to(shared, rotated.shape).astype(key.dtype)], axis=-1)
        else:
            plain, key, value = absorbed.query(plain), shared, latent[:, :, None]
        mixed, cached = attention(
            jnp.concatenate([plain, rotated.astype(plain.dtype)], axis=-1),
            key,
            value,
            positions=context.positions,
            segments=context.segments,
            pages=cached,
            scale=design.scale,
            window=context.window,
            windows=context.windows,
            longest_first=context.longest_first,
        )
        mixed = (mixed if absorbed is None else absorbed.value(mixed)).astype(x.dtype)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1), lora and lora.at("o_proj")), cached

    def _keys_and_values(self, latent: Hidden, lora: Lora | None) -> list[Float[Array, "batch tokens heads width"]]:
        made = product(latent, self.kv_b_proj.weight[...], jnp.float32)
        made = made if lora is None else made + lora.delta(latent)
        return jnp.split(made.reshape(*made.shape[:2], self.design.heads, -1), [self.design.plain_dim], axis=-1)

    def _query(self, x: Hidden, lora: Lora | None) -> Float[Array, "batch tokens heads head_dim"]:
        if self.design.query_latent is None:
            query = self.q_proj(x, lora and lora.at("q_proj"))
        else:
            latent = self.q_a_layernorm(self.q_a_proj(x, lora and lora.at("q_a_proj")))
            query = self.q_b_proj(latent, lora and lora.at("q_b_proj"))
        return query.reshape(*x.shape[:2], self.design.heads, -1)


class _Absorbed:
    """The projection from latents to keys and values, with each row's adapter. Applied to queries and outputs instead.

    Results are float32: rounded results would differ from the results of the projection itself.
    """

    def __init__(self, kernel: Float[Array, "latent key_value"], design: LatentAttention, lora: Lora | None, rows: int):
        def of_heads(matrix: Float[Array, "*leading key_value"]) -> list[Float[Array, "*leading heads width"]]:
            return jnp.split(matrix.reshape(*matrix.shape[:-1], design.heads, -1), [design.plain_dim], axis=-1)

        self.keys, self.values = of_heads(kernel)
        self.down = None
        if lora is not None:
            self.down, up = lora.of_rows(rows)
            self.up_keys, self.up_values = of_heads(up)

    def query(self, plain: Float[Array, "batch tokens heads plain"]) -> Float[Array, "batch tokens heads latent"]:
        """Return queries. Their products with latents equal the products of `plain` with keys."""
        query = jnp.einsum("bthn,lhn->bthl", plain, self.keys, preferred_element_type=jnp.float32)
        if self.down is None:
            return query
        low = jnp.einsum("bthn,brhn->bthr", plain.astype(jnp.float32), self.up_keys)
        return query + jnp.einsum("bthr,blr->bthl", low, self.down)

    def value(self, mixed: Float[Array, "batch tokens heads latent"]) -> Float[Array, "batch tokens heads value"]:
        """Return weighted sums of values, given weighted sums of latents."""
        value = jnp.einsum("bthl,lhv->bthv", mixed, self.values.astype(jnp.float32))
        if self.down is None:
            return value
        low = jnp.einsum("bthl,blr->bthr", mixed, self.down)
        return value + jnp.einsum("bthr,brhv->bthv", low, self.up_values)
