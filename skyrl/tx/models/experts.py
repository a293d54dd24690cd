"""Mixture of experts: a router selects some experts (gated blocks) for each token and sums their weighted outputs.

Tokens are sorted by expert (and, in a bank of adapters, by slot), so that each expert processes only its own tokens,
and each token uses only its own adapter's matrices. Routing is float32 whatever the model's dtype, and the first expert
wins ties, so a token is routed identically in training and sampling.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_batching import sequential_vmap
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from skyrl.tx.design.design import Experts, Gated
from skyrl.tx.layers.devices import ROWS, axis_size, is_mapped
from skyrl.tx.layers.grouped import Grouping, grouped, grouped_product
from skyrl.tx.layers.lora import Lora
from skyrl.tx.models.gated import ACTIVATIONS, GatedLayer

Rows = Float[Array, "tokens hidden"]
Weights = Float[Array, "tokens k"]
Chosen = Int[Array, "tokens k"]
Kernels = dict[str, Float[Array, "experts in out"]]
"""Weights of experts by the name of the projection."""

HIDDEN = {"gate_proj": -2, "up_proj": -2, "down_proj": -1}
"""Projections of an expert, with the place of the hidden dimension in their kernels."""


class ExpertLinear(nnx.Module):
    """Weights of one linear layer per expert."""

    def __init__(self, shapes: dict[str, Any], dtype: jnp.dtype, rngs: nnx.Rngs):
        self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shapes["kernel"], dtype))


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

    def __call__(self, x: Rows, design: Experts) -> tuple[Weights, Chosen]:
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
        rows, design = x.reshape(-1, x.shape[-1]), self.design
        weights, chosen = self.gate(rows, design)
        kernels = {name: getattr(self.experts, name).kernel[...] for name in HIDDEN}
        own = None if lora is None else lora.at("experts")
        spread = axis_size("ep") * axis_size("fsdp") * axis_size("tp") > 1
        added = (self._split if spread else self._added)(kernels, own, rows, weights, chosen)
        added = added.astype(x.dtype).reshape(x.shape)
        if not design.shared:
            return added
        return added + self.shared_experts(x, lora and lora.at("shared_experts"))

    def _split(self, kernels: Kernels, lora: Lora | None, rows: Rows, weights: Weights, chosen: Chosen) -> Rows:
        """Compute `_added` on a mesh. Experts are split over `ep`, inner dimensions over `tp`, hidden ones over `fsdp`.

        Each device computes its part of its own experts for the tokens of all devices of `ep`, and the results are
        summed once, so that any number of tokens may select an expert. Each device of `fsdp` either has batches of its
        own, if the caller splits a batch, and gathers the weights; or it has all tokens, and multiplies its part of the
        hidden dimension. Batches of the devices of `ep` are computed one after the other, as all their tokens may
        select experts of one device.
        """
        own_batch, of_rows, of_kernels = is_mapped(ROWS), rows.dtype, kernels["gate_proj"].dtype
        cut = "fsdp" if not own_batch and rows.shape[-1] % axis_size("fsdp") == 0 else None
        inner = "tp" if self.design.inner % axis_size("tp") == 0 else None
        summed = ("ep",) if inner is None else ("ep", inner)

        def of_device(kernels: Kernels, lora: Lora | None, wide: Rows, weights: Weights, chosen: Chosen) -> Rows:
            first = jax.lax.axis_index("ep") * len(kernels["gate_proj"])
            kernels = {name: kernel.astype(of_kernels) for name, kernel in kernels.items()}
            if lora is not None and lora.dropout is not None and axis_size("ep") > 1:
                lora = lora._replace(dropout=lora.dropout.at(first))
            wide, chosen = wide.astype(of_rows), chosen - first
            if not own_batch or axis_size("ep") == 1:
                return jax.lax.psum(self._added(kernels, lora, wide, weights, chosen, cut), summed)

            def added(inputs: tuple[Kernels, Lora | None, Rows, Weights], others: tuple[Chosen, Any]) -> Rows:
                (kernels, lora, wide, weights), (chosen, dropout) = inputs, others
                return self._added(kernels, lora and lora._replace(dropout=dropout), wide, weights, chosen)

            dropout, lora = lora and lora.dropout, lora and lora._replace(dropout=None)
            return jax.lax.psum(_one_by_one(added, (kernels, lora, wide, weights), (chosen, dropout)), summed)

        def spec(leaf: Array, *last: str | None) -> PartitionSpec:
            return PartitionSpec("ep", *[None] * (leaf.ndim - 3), *last)

        whole, split = PartitionSpec(), PartitionSpec(None, cut)
        sides = {name: (cut, inner) if place == -2 else (inner, cut) for name, place in HIDDEN.items()}
        split_kernels = {name: spec(kernel, *sides[name]) for name, kernel in kernels.items()}
        split_lora: Any = None
        if lora is not None:
            pairs = {
                name: {"lora_A": spec(pair["lora_A"], read, None), "lora_B": spec(pair["lora_B"], None, made)}
                for name, pair in lora.weights.items()
                for read, made in [sides[name]]
            }
            split_lora = Lora(pairs, whole, whole, whole)  # pyright: ignore[reportArgumentType]
        specs = split_kernels, split_lora, split, whole, whole
        shared = jax.shard_map(of_device, in_specs=specs, out_specs=split, check_vma=False)
        if own_batch:  # gradients of devices are summed in float32; XLA's CPU cannot sum others here
            gathered = {name: _gathered(kernel, HIDDEN[name]) for name, kernel in kernels.items()}
            kernels = {name: kernel.astype(jnp.float32) for name, kernel in gathered.items()}
        return shared(kernels, lora, rows.astype(jnp.float32), weights, chosen)

    def _added(
        self,
        kernels: Kernels,
        lora: Lora | None,
        rows: Rows,
        weights: Weights,
        chosen: Chosen,
        cut: str | None = None,
    ) -> Rows:
        """Return the weighted sums of experts' outputs, float32. Selected experts without a kernel add 0.

        `cut`: mesh axis over which the hidden dimension is split; None: it is whole.
        """
        design, count, slots = self.design, len(kernels["gate_proj"]), 1
        chosen, scaling, of_row = chosen.reshape(-1), None, None
        if lora is not None and lora.slots is not None:
            slots = lora.weights["gate_proj"]["lora_A"].shape[-3]
            of_row = jnp.clip(jnp.repeat(lora.slots, len(chosen) // len(lora.slots)), 0, slots - 1)
            chosen = chosen * slots + of_row
        grouping = grouped(chosen, count * slots, of=None if count == design.count else design.count * slots)
        if lora is not None and lora.slots is not None:
            per_row = jnp.repeat(jnp.where(lora.slots < 0, 0.0, lora.scaling), len(chosen) // len(lora.slots))
            scaling = grouping.gather(per_row[:, None], 1)
        elif lora is not None:
            scaling = jnp.broadcast_to(jax.lax.stop_gradient(lora.scaling), (*grouping.source.shape, 1))

        def apply(name: str, x: Float[Array, "blocks size in"]) -> Float[Array, "blocks size out"]:
            return _linear(x, kernels[name], grouping, lora and lora.at(name), scaling)

        blocks = grouping.gather(rows, design.active)
        gate, up = apply("gate_proj", blocks), apply("up_proj", blocks)
        if cut is not None:
            gate, up = (jax.lax.psum(part.astype(jnp.float32), cut).astype(part.dtype) for part in (gate, up))
        inner = ACTIVATIONS[design.activation](gate) * up
        made = grouping.scatter(apply("down_proj", inner))
        made = made.reshape(len(rows), design.active, -1).astype(jnp.float32)
        return (made * weights[:, :, None]).sum(axis=1)


def _one_by_one(function: Callable[[Any, Any], Any], inputs: Any, others: Any) -> Any:
    """Compute `function(inputs, others)` for one element of a mapped batch after the other, in both passes.

    Memory is then that of one element. The backward pass computes the function again. `others` get no gradients.
    """

    @jax.custom_vjp
    def computed(inputs: Any, others: Any) -> Any:
        return sequential_vmap(function)(inputs, others)

    @sequential_vmap
    def gradients(inputs: Any, others: Any, gradient: Any) -> Any:
        return jax.vjp(lambda inputs: function(inputs, others), inputs)[1](gradient)[0]

    def backward(saved: tuple[Any, Any], gradient: Any) -> tuple[Any, None]:
        return gradients(*saved, gradient), None

    computed.defvjp(lambda *arguments: (computed(*arguments), arguments), backward)
    return computed(inputs, others)


def _linear(
    x: Float[Array, "blocks size in"],
    kernel: Float[Array, "experts in out"],
    grouping: Grouping,
    lora: Lora | None,
    scaling: Float[Array, "blocks size 1"] | None,
) -> Float[Array, "blocks size out"]:
    """Apply each expert's linear layer to its rows. `scaling` is the scaling of each row's adapter."""
    slots = 1 if lora is None or lora.slots is None else lora.weights["lora_A"].shape[-3]
    y = grouped_product(x, kernel, grouping, slots)
    if lora is None or scaling is None:
        return y
    a, b = (lora.weights[name] for name in ("lora_A", "lora_B"))
    a, b = (matrix.reshape(-1, *matrix.shape[-2:]) for matrix in (a, b))
    low = grouped_product(lora.read(x), a, grouping) * scaling
    return (y.astype(jnp.float32) + grouped_product(low, b, grouping)).astype(y.dtype)


def _gathered(kernel: Float[Array, "experts in out"], hidden: int) -> Float[Array, "experts in out"]:
    """Copy the parts of a kernel from devices of `fsdp` to each other. `hidden`: place of the hidden dimension."""
    axes: list[Any] = ["ep", PartitionSpec.UNCONSTRAINED, PartitionSpec.UNCONSTRAINED]
    axes[hidden] = None
    return jax.lax.with_sharding_constraint(kernel, PartitionSpec(*axes))
