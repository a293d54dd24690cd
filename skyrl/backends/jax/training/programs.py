"""The compiled training programs: pure functions of (base weights, adapters, batch).

A pass maps one tile to outputs and to the gradients of the tile's adapter. Tiles may be stacked along a leading axis,
with one adapter per tile. The stack is a `vmap`: base GEMMs process all tokens at once, and each adapter has separate
gradients, without sums over adapters. A stack of one runs as plain GEMMs. On a mesh, the tiles of a stack are split
over `fsdp`, and they may share one adapter. A loss of the Tinker protocol, its settings and its inputs are data, so
only shapes determine what is compiled. An objective of a trainer has its own programs, looked up by its value. Each
tenant keeps programs for its `OBJECTIVES` last used objectives.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial, reduce, wraps
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from skyrl.algorithms.losses import LossInputs, mixed_loss
from skyrl.algorithms.objective import Objective, Output
from skyrl.algorithms.traced.objective import measured
from skyrl.backends.common.adamw import AdamScalars
from skyrl.backends.common.dimuon import DimuonScalars, matrix_sign
from skyrl.backends.common.packing import MAX_SEGMENTS, TileArrays, idle_tile
from skyrl.backends.common.pass_output import PassOutput
from skyrl.backends.jax.compile_cache import Compiler, Program
from skyrl.backends.jax.layout import Layout
from skyrl.backends.jax.models.state import Tree, in_types_of
from skyrl.tx.design.connectors import CONNECTORS
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.layers.devices import ROWS
from skyrl.tx.layers.dropout import Dropout
from skyrl.tx.layers.logprobs import Needs

OBJECTIVES = 8
"""Maximum objectives of a tenant with compiled programs; the least recently used is evicted."""
ALL_OBJECTIVES = 64
"""Maximum objectives of all tenants. Beyond that, an objective of the tenant with the most objectives is evicted."""


class TrainingPrograms:
    """Forward, forward-backward and optimizer step for one architecture.

    Args:
        graphdef: Returns the model's static part for a tile length (parts differ in activation checkpointing).
        loss_chunk_size: Tokens whose logits are in memory at once; 0: all of a tile.
        deterministic: See `Compiler`.
        layout: Placement of arrays.
    """

    def __init__(self, graphdef: Callable[[int], Any], loss_chunk_size: int, deterministic: bool, layout: Layout):
        self._graphdef = graphdef
        self._layout = layout
        self._loss_chunk_size = loss_chunk_size
        self._compiler = Compiler("training", deterministic)
        self._programs: dict[Objective, tuple[Program, Program]] = {}
        self._used: dict[str, OrderedDict[Objective, None]] = {}
        """Objectives of each tenant, least recently used first, never empty."""
        self.forward, self.forward_backward = self._programs_of(None)
        """Programs for losses of the Tinker protocol, see `of`."""
        self.optim_step = self._compiler.jit("optim_step", self._placed(adamw))
        self.dimuon_step = self._compiler.jit("dimuon_step", self._placed(dimuon))
        self.connector_norm = self._compiler.jit("connector_norm", connector_norm)
        self.add = self._compiler.jit("add", self._placed(lambda a, b: jax.tree.map(jnp.add, a, b)))
        """Sum of two trees of gradients."""

    def of(self, objective: Objective | None, tenant: str = "") -> tuple[Program, Program]:
        """Return the programs of a tenant's objective. None: programs for all losses of the Tinker protocol.

        The first is (base, adapter, tiles) -> PassOutput of each tile. The second is (base, adapters, tiles) ->
        (PassOutput of each tile, gradients of each adapter), with an adapter for each tile, or one for all. All tiles
        have the same shape, and all adapters the same rank.
        """
        if objective is None:
            return self.forward, self.forward_backward
        if objective not in self._programs:
            self._programs[objective] = self._programs_of(objective)
        own = self._used.setdefault(tenant, OrderedDict())
        own[objective] = None
        own.move_to_end(objective)
        if len(own) > OBJECTIVES:
            self._forget_oldest(tenant)
        if sum(map(len, self._used.values())) > ALL_OBJECTIVES:
            self._forget_oldest(max(self._used, key=lambda name: (len(self._used[name]), name != tenant)))
        return self._programs[objective]

    def _forget_oldest(self, tenant: str) -> None:
        """Evict a tenant's least recently used objective, and its programs unless another tenant uses them."""
        oldest, _ = self._used[tenant].popitem(last=False)
        if not self._used[tenant]:
            del self._used[tenant]
        if not any(oldest in others for others in self._used.values()):
            del self._programs[oldest]

    def _programs_of(self, objective: Objective | None) -> tuple[Program, Program]:
        losses = partial(self._losses, objective)

        def forward(base: Any, adapter: Adapter, tiles: tuple[TileArrays, ...]) -> list[PassOutput]:
            adapter = self._layout.gathered_adapter(adapter)
            return self._over_tiles(lambda tile: losses(adapter.weights, adapter.scaling, base, tile)[1], tiles)

        def of_adapter(base: Any, adapter: Adapter, tiles: tuple[TileArrays, ...]) -> tuple[Tree, list[PassOutput]]:
            def summed(weights: Tree) -> tuple[jax.Array, list[PassOutput]]:
                computed = self._over_tiles(lambda tile: losses(weights, adapter.scaling, base, tile), tiles)
                return reduce(jnp.add, [loss for loss, _ in computed]), [output for _, output in computed]

            return jax.grad(summed, has_aux=True)(adapter.weights)

        def forward_backward(
            base: Any, adapters: tuple[Adapter, ...], tiles: tuple[TileArrays, ...]
        ) -> tuple[list[PassOutput], list[Tree]]:
            first, *others = adapters
            if others:
                return self._over_adapters(partial(of_adapter, base), adapters, tiles)
            gradients, outputs = of_adapter(base, self._layout.gathered_adapter(first), tiles)
            return outputs, [self._layout.constrained(gradients)]

        return (
            self._compiler.program("forward", forward),
            self._compiler.program("forward_backward", forward_backward),
        )

    def _over_tiles(self, function: Callable[[TileArrays], Any], tiles: tuple[TileArrays, ...]) -> list[Any]:
        """Apply `function` to each tile, as one `vmap`. A single tile keeps plain, unbatched GEMMs."""
        if len(tiles) == 1:
            return [function(jax.tree.map(jnp.asarray, tiles[0]))]
        results = self._mapped(lambda _, tile: function(tile), None, tiles)
        return _parts(self._layout.on_all(results), len(tiles))

    def _over_adapters(
        self, function: Any, adapters: tuple[Adapter, ...], tiles: tuple[TileArrays, ...]
    ) -> tuple[list[PassOutput], list[Tree]]:
        """Apply `function` to each adapter and its tile, as one `vmap`."""
        layout, first = self._layout, adapters[0]
        stack = layout.by_rows(_stacked([layout.gathered_adapter(adapter) for adapter in adapters]), first)
        gradients, outputs = self._mapped(lambda adapter, tile: function(adapter, (tile,)), stack, tiles)
        of_each = _parts(layout.by_rows(gradients, first.weights), len(tiles))
        return _parts(layout.on_all(outputs[0]), len(tiles)), list(map(layout.constrained, of_each))

    def _mapped(self, function: Callable[[Any, TileArrays], Any], adapters: Any, tiles: tuple[TileArrays, ...]) -> Any:
        """Apply `function` to a stack of adapters, if there is one, and the stack of their tiles.

        Loops over needed tokens are as long for every tile as for the tile that needs most, because a loop's length
        cannot be batched.
        """
        stack = self._layout.by_rows(_stacked(tiles))
        needed = {"trained": stack.trained.max(), "read": stack.read.max()}
        axis = "fsdp" if self._layout.spread else None
        mapped = jax.vmap(
            lambda adapter, tile: function(adapter, tile._replace(**needed)), axis_name=ROWS, spmd_axis_name=axis
        )
        return mapped(adapters, stack)

    def _placed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its results, trees of a model's arrays, in their places."""

        @wraps(function)
        def placed(*args: Any) -> Any:
            results = function(*args)
            if isinstance(results, tuple):
                return tuple(map(self._layout.constrained, results))
            return self._layout.constrained(results)

        return placed

    def _losses(
        self, objective: Objective | None, weights: Tree, scaling: jax.Array, base: Any, tile: TileArrays
    ) -> tuple[jax.Array, PassOutput]:
        """Sum of the tile's losses, and its outputs."""
        outputs = ("logprobs",) if objective is None else objective.outputs
        dropout = None if tile.dropout is None else Dropout(*map(jnp.asarray, tile.dropout))
        own = Adapter(weights, scaling, dropout)
        adapter = own if own.own_base is None else None
        if own.own_base is not None:
            base = in_types_of(base, own.own_base)
        model = nnx.merge(self._graphdef(len(tile.tokens)), base)
        hidden = model(
            tile.tokens[None], positions=tile.positions[None], segment_ids=tile.segments[None], adapter=adapter
        ).last_hidden_state[0]
        scores: dict[Output, jax.Array] = {}
        if "logprobs" in outputs:
            scored = model.target_scores(
                hidden,
                tile.targets,
                adapter=adapter,
                needs=Needs(*map(jnp.asarray, (tile.order, tile.trained, tile.read))),
                chunk_size=self._loss_chunk_size,
                temperature=tile.temperature,
                entropy="entropy" in outputs,
                train_base=adapter is None,
            )
            scores |= {"logprobs": scored.logprobs}
            scores |= {} if scored.entropy is None else {"entropy": scored.entropy}
        if "values" in outputs:
            scores["values"] = hidden.astype(jnp.float32) @ weights["value_head"]
        x = _loss_inputs(tile, scores)
        if objective is None:
            losses, metrics = mixed_loss(x, tile.loss_index[None, None], tile.knobs[None]), {}
        else:
            losses, metrics = measured(objective, x)
        token_losses, of_sequences = losses[0], {name: value[0] for name, value in metrics.items()}
        return token_losses.sum(), PassOutput(token_losses, scores, of_sequences)

    @property
    def compiled(self) -> int:
        """Number of compiled programs."""
        return self._compiler.compiled

    def temporary_bytes(self, base: Any, adapter: Adapter, length: int) -> int:
        """Temporary bytes of forward_backward of one tile of `length` tokens, without arguments and results.

        On a mesh, bytes of a device, if there is a tile for each row.
        """
        tiles = (abstract_tile(length, 1),) * self._layout.rows
        return self.forward_backward.temporary_bytes(base, (adapter,), tiles)


def abstract_tile(length: int, width: int) -> TileArrays:
    """Abstract tile of `length` tokens with `width` targets each, for compilation."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), idle_tile(length, width))


def adamw(
    weights: Tree, gradients: Tree, first: Tree, second: Tree, p: AdamScalars
) -> tuple[Tree, Tree, Tree, jax.Array]:
    """Take one AdamW step, as `torch.optim.AdamW` after `torch.nn.utils.clip_grad_norm_`.

    Gradient sums are first divided by `p.gradient_divisor`. Returns new weights, first and second moments, and the
    global norm of the gradients after division and before clipping.

    Source: Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101, algorithm 2; decay is decoupled and multiplied
    by the learning rate.
    """
    norm, scale = _scale(gradients, p)
    gradients = jax.tree.map(lambda g: g * scale, gradients)
    first = jax.tree.map(lambda m, g: p.keep_first * m + p.new_first * g, first, gradients)
    second = jax.tree.map(lambda v, g: p.keep_second * v + p.new_second * g * g, second, gradients)

    def update(weight: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return weight * p.decay - p.step_size * m / (jnp.sqrt(v) / p.root_correction + p.eps)

    return jax.tree.map(update, weights, first, second), first, second, norm


def dimuon(weights: Tree, gradients: Tree, momentum: Tree, p: DimuonScalars) -> tuple[Tree, Tree, jax.Array]:
    """Take a step of `skyrl.backends.common.dimuon`. Returns new weights and momentum, and the norm before clipping."""
    norm, scale = _scale(gradients, p)
    momentum = jax.tree.map(lambda m, g: p.keep * m + p.new * g * scale, momentum, gradients)
    with jax.default_matmul_precision("highest"):
        weights = jax.tree.map(lambda weight, m: weight - p.learning_rate * matrix_sign(m), weights, momentum)
    return weights, momentum, norm


def connector_norm(gradients: Tree) -> jax.Array:
    """Global norm of the gradients of connectors."""
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    own = [leaf for path, leaf in leaves if any(getattr(part, "key", None) in CONNECTORS for part in path)]
    return jnp.sqrt(sum((jnp.sum(jnp.square(leaf)) for leaf in own), jnp.float32(0)))


def _scale(gradients: Tree, p: AdamScalars | DimuonScalars) -> tuple[jax.Array, jax.Array]:
    """Global norm of gradients after division by `p.gradient_divisor`, and the factor that divides and clips sums.

    Clipping multiplies by min(1, limit / (norm + 1e-6)).
    """
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients))) / p.gradient_divisor
    clip = jnp.where(p.grad_clip_norm > 0, jnp.minimum(1.0, p.grad_clip_norm / (norm + 1e-6)), 1.0)
    return norm, clip / p.gradient_divisor


def _stacked(parts: Sequence[Any]) -> Any:
    """Stack equal structures along a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)


def _parts(stack: Any, count: int) -> list[Any]:
    """Return the parts of a stack."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(count)]


def _loss_inputs(tile: TileArrays, scores: dict[Output, jax.Array]) -> LossInputs:
    """Inputs of losses, as one row. With several targets per token, the log-probability is their weighted sum."""
    logprobs = scores.get("logprobs", jnp.zeros(tile.targets.shape))
    if logprobs.shape[-1] == 1:
        logprob, weights = logprobs[:, 0], tile.weights[:, 0]
    else:
        logprob = (logprobs * tile.weights).sum(-1)
        weights = jnp.ones_like(logprob)
    tokens: dict[str, Any] = {**tile.inputs, **scores, "logprobs": logprob, "weights": weights}
    if tile.named is not None:
        tokens["named"] = {**tile.named, "logprobs": logprob if logprobs.shape[-1] == 1 else logprobs}
    row = jax.tree.map(lambda leaf: leaf[None], tokens)
    return LossInputs(segments=tile.segments[None], num_segments=MAX_SEGMENTS, **row)
