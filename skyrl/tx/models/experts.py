"""Mixture of experts: a router selects some experts (gated blocks) for each token and sums their weighted outputs.

Tokens are sorted by expert (and, in a bank of adapters, by slot), so that each expert processes only its own tokens,
and each token uses only its own adapter's matrices. Routing is float32 whatever the model's dtype, and the first expert
wins ties, so a token is routed identically in training and sampling.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from skyrl.tx.design.design import Experts, Gated
from skyrl.tx.layers.grouped import Grouping, grouped, grouped_product
from skyrl.tx.layers.lora import Lora
from skyrl.tx.models.gated import ACTIVATIONS, GatedLayer

Rows = Float[Array, "tokens hidden"]


class ExpertLinear(nnx.Module):
    """One linear layer per expert. Each row uses the layer of its expert."""

    def __init__(self, shapes: dict[str, Any], dtype: jnp.dtype, rngs: nnx.Rngs):
        self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shapes["kernel"], dtype))

    def __call__(
        self,
        x: Float[Array, "blocks size in"],
        grouping: Grouping,
        lora: Lora | None,
        scaling: Float[Array, "blocks size 1"] | None,
    ) -> Float[Array, "blocks size out"]:
        """Apply to the rows of blocks. `scaling` is the scaling of each row's adapter."""
        slots = 1 if lora is None or lora.slots is None else lora.weights["lora_A"].shape[-3]
        y = grouped_product(x, self.kernel[...], grouping.group // slots)
        if lora is None or scaling is None:
            return y
        a, b = (lora.weights[name] for name in ("lora_A", "lora_B"))
        a, b = (matrix.reshape(-1, *matrix.shape[-2:]) for matrix in (a, b))
        low = grouped_product(lora.read(x), a, grouping.group) * scaling
        return (y.astype(jnp.float32) + grouped_product(low, b, grouping.group)).astype(y.dtype)


class ExpertWeights(nnx.Module):
    """The three linear layers of all experts."""

    def __init__(self, shapes: dict[str, Any], dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate_proj = ExpertLinear(shapes["gate_proj"], dtype, rngs)
        self.up_proj = ExpertLinear(shapes["up_proj"], dtype, rngs)
        self.down_proj = ExpertLinear(shapes["down_proj"], dtype, rngs)


class Router(nnx.Module):
    """Router: scores and selects experts."""

    def __init__(self, shapes: dict[str, Any], dtype: jnp.dtype, rngs: nnx.Rngs):
        self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shapes["kernel"], dtype))
        # float32 whatever the model's dtype: it is trained in steps of 0.001, which decide near ties.
        own = shapes.get("correction")
        self.correction = None if own is None else nnx.Param(jnp.zeros(own, jnp.float32))

    def __call__(self, x: Rows, design: Experts) -> tuple[Float[Array, "tokens k"], Int[Array, "tokens k"]]:
        """Return (float32 weights, indices) of each token's experts."""
        scores = jnp.matmul(x.astype(jnp.float32), self.kernel[...].astype(jnp.float32), precision="highest")
        scores = jax.nn.sigmoid(scores) if design.sigmoid else jax.nn.softmax(scores, axis=-1)
        ranked = scores if self.correction is None else scores + self.correction[...][None]
        if design.active_groups < design.groups:
            ranked = _of_best_groups(ranked, design.groups, design.active_groups)
        weights, chosen = jax.lax.top_k(ranked, design.active)
        if ranked is not scores:
            weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if design.normalised:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return weights if design.factor == 1 else weights * design.factor, chosen


def _of_best_groups(ranked: Float[Array, "tokens experts"], groups: int, active: int) -> Float[Array, "tokens experts"]:
    """Set scores to -inf outside the `active` groups with the largest sums of their two highest scores."""
    grouped = ranked.reshape(len(ranked), groups, -1)
    best = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(axis=-1), active)[1]
    kept = jax.nn.one_hot(best, groups, dtype=bool).any(axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)


class ExpertsLayer(nnx.Module):
    """Feed-forward block with experts."""

    def __init__(self, design: Experts, shapes: dict[str, Any], dtype: jnp.dtype, rngs: nnx.Rngs):
        self.design = design
        self.gate = Router(shapes["gate"], dtype, rngs)
        self.experts = ExpertWeights(shapes["experts"], dtype, rngs)
        if design.shared:
            gated = Gated(design.shared, design.activation)
            self.shared_experts = GatedLayer(gated, shapes["shared_experts"], dtype, rngs)

    def __call__(
        self, x: Float[Array, "batch tokens hidden"], lora: Lora | None
    ) -> Float[Array, "batch tokens hidden"]:
        """Apply to each token."""
        rows, design, experts = x.reshape(-1, x.shape[-1]), self.design, self.experts
        weights, chosen = self.gate(rows, design)
        chosen = chosen.reshape(-1)
        own, scaling, slots = None if lora is None else lora.at("experts"), None, 1
        if own is not None and own.slots is not None:
            slots = own.weights["gate_proj"]["lora_A"].shape[-3]
            of_row = jnp.repeat(own.slots, len(chosen) // len(own.slots))
            grouping = grouped(chosen * slots + jnp.clip(of_row, 0, slots - 1), design.count * slots)
            per_row = jnp.repeat(jnp.where(own.slots < 0, 0.0, own.scaling), len(chosen) // len(own.slots))
            scaling = grouping.gather(per_row[:, None], 1)
        else:
            grouping = grouped(chosen, design.count)
            if own is not None:
                scaling = jnp.broadcast_to(jax.lax.stop_gradient(own.scaling), (*grouping.source.shape, 1))
        blocks = grouping.gather(rows, design.active)
        gate = experts.gate_proj(blocks, grouping, own and own.at("gate_proj"), scaling)
        up = experts.up_proj(blocks, grouping, own and own.at("up_proj"), scaling)
        inner = ACTIVATIONS[design.activation](gate) * up
        made = grouping.scatter(experts.down_proj(inner, grouping, own and own.at("down_proj"), scaling))
        made = made.reshape(len(rows), design.active, -1).astype(jnp.float32)
        added = (made * weights[:, :, None]).sum(axis=1).astype(x.dtype).reshape(x.shape)
        if not design.shared:
            return added
        return added + self.shared_experts(x, lora and lora.at("shared_experts"))
