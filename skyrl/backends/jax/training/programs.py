"""The compiled training programs: pure functions of (base weights, adapters, batch).

A pass maps one tile to outputs and the gradients of the adapter that it belongs to. Tiles may be stacked along a
leading axis, one adapter each: the stack is a `vmap`, so base GEMMs see all tokens at once while each adapter's
gradient comes out on its own and nothing contracts over adapters. A stack of one runs as plain GEMMs. Which loss of the
protocol, its settings and its inputs are data, so shapes alone decide what is compiled; a trainer's objective has
programs of its own, found by its value and kept for the `OBJECTIVES` that were used last.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from skyrl.algorithms.losses import LossInputs, mixed_loss
from skyrl.algorithms.objective import Objective, Output
from skyrl.backends.common.packing import MAX_SEGMENTS, TileArrays, idle_tile
from skyrl.backends.jax.compile_cache import Compiler, Program
from skyrl.backends.jax.models.state import Tree, in_types_of
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.layers.logprobs import Needs
from skyrl.types import AdamParams

OBJECTIVES = 16
"""Objectives of trainers whose programs are kept; those of the least recently used one go when there is another."""

SMALLEST_EPS = float(np.finfo(np.float32).tiny)
"""What is smaller is 0 in float32, and would make 0 / 0 of weights that never had a gradient."""


class PassOutput(NamedTuple):
    """Per token: loss `[N]`, and what it is computed from."""

    losses: jax.Array
    scores: dict[Output, jax.Array]
    """Log-probability of each target `[N, K]`, entropy and value `[N]`: those that the loss reads."""


class AdamScalars(NamedTuple):
    """One step's hyper-parameters as arrays, so that changing them compiles nothing. float32 scalars."""

    step_size: jax.Array
    """learning rate / (1 - beta1 ** step)."""
    root_correction: jax.Array
    """sqrt(1 - beta2 ** step)."""
    keep_first: jax.Array
    """beta1."""
    keep_second: jax.Array
    """beta2."""
    new_first: jax.Array
    """1 - beta1."""
    new_second: jax.Array
    """1 - beta2."""
    eps: jax.Array
    decay: jax.Array
    """1 - learning rate * weight decay."""
    grad_clip_norm: jax.Array
    """0 does not clip."""

    @classmethod
    def of(cls, params: AdamParams, step: int) -> "AdamScalars":
        """Scalars of step number `step` (from 1), computed in float64 as torch does."""
        values = (
            params.learning_rate / (1.0 - params.beta1**step),
            (1.0 - params.beta2**step) ** 0.5,
            params.beta1,
            params.beta2,
            1.0 - params.beta1,
            1.0 - params.beta2,
            max(params.eps, SMALLEST_EPS),
            1.0 - params.learning_rate * params.weight_decay,
            params.grad_clip_norm,
        )
        with np.errstate(over="ignore"):  # a learning rate beyond float32 makes that model infinite, and no other
            return cls(*(np.float32(value) for value in values))  # pyright: ignore[reportArgumentType]


class TrainingPrograms:
    """Forward, forward-backward and optimizer step of one base model's architecture.

    Args:
        graphdef: For a tile's length, the model's static part (they differ in what is kept for the backward pass).
        loss_chunk_size: Tokens whose logits are in memory at once; 0: all of a tile.
        deterministic: See `Compiler`.
    """

    def __init__(self, graphdef: Callable[[int], Any], loss_chunk_size: int, deterministic: bool):
        self._graphdef = graphdef
        self._loss_chunk_size = loss_chunk_size
        self._compiler = Compiler("training", deterministic)
        self._programs: OrderedDict[Objective, tuple[Program, Program]] = OrderedDict()
        """By objective, the least recently used first."""
        self.forward, self.forward_backward = self._programs_of(None)
        """Those for losses of the protocol, see `of`."""
        self.optim_step = self._compiler.jit("optim_step", adamw)
        self.add = self._compiler.jit("add", lambda a, b: jax.tree.map(jnp.add, a, b))
        """The sum of two trees of gradients."""

    def of(self, objective: Objective | None) -> tuple[Program, Program]:
        """The programs of a trainer's objective; None: of the losses of the protocol, which the tile names.

        The first is (base, adapter, tile) -> PassOutput. The second is (base, adapters, tiles) -> (PassOutput,
        gradients) of each tile; tiles have one shape, adapters one rank.
        """
        if objective is None:
            return self.forward, self.forward_backward
        if objective not in self._programs:
            self._programs[objective] = self._programs_of(objective)
            if len(self._programs) > OBJECTIVES:
                self._programs.popitem(last=False)
        self._programs.move_to_end(objective)
        return self._programs[objective]

    def _programs_of(self, objective: Objective | None) -> tuple[Program, Program]:
        losses = partial(self._losses, objective)

        def forward(base: Any, adapter: Adapter, tile: TileArrays) -> PassOutput:
            return losses(adapter.weights, adapter.scaling, base, tile)[1]

        def forward_backward(base: Any, adapter: Adapter, tile: TileArrays) -> tuple[PassOutput, Tree]:
            gradients, output = jax.grad(losses, has_aux=True)(adapter.weights, adapter.scaling, base, tile)
            return output, gradients

        def over_stack(base: Any, adapters: tuple[Adapter, ...], tiles: tuple[TileArrays, ...]) -> list[Any]:
            return _over_stack(forward_backward, base, adapters, tiles)

        return (
            self._compiler.program("forward", forward),
            self._compiler.program("forward_backward", over_stack),
        )

    def _losses(
        self, objective: Objective | None, weights: Tree, scaling: jax.Array, base: Any, tile: TileArrays
    ) -> tuple[jax.Array, PassOutput]:
        """The sum of the tile's losses."""
        outputs = ("logprobs",) if objective is None else objective.outputs
        own = Adapter(weights, scaling)
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
            token_losses = mixed_loss(x, tile.loss_index[None, None], tile.knobs[None])[0]
        else:
            token_losses = objective(x)[0]
        return token_losses.sum(), PassOutput(token_losses, scores)

    @property
    def compiled(self) -> int:
        """Programs compiled so far."""
        return self._compiler.compiled

    def temporary_bytes(self, base: Any, adapter: Adapter, length: int) -> int:
        """Memory that forward_backward of one tile of `length` tokens takes beside arguments and results, bytes."""
        return self.forward_backward.temporary_bytes(base, (adapter,), (abstract_tile(length, 1),))


def abstract_tile(length: int, width: int) -> TileArrays:
    """What a tile of `length` tokens with `width` targets each is compiled for."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), idle_tile(length, width))


def adamw(
    weights: Tree, gradients: Tree, first: Tree, second: Tree, p: AdamScalars
) -> tuple[Tree, Tree, Tree, jax.Array]:
    """One AdamW step, as `torch.optim.AdamW` after `torch.nn.utils.clip_grad_norm_`.

    Returns new weights, first and second moments, and the global gradient norm before clipping.

    Source: Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101, algorithm 2; decay is decoupled and multiplied
    by the learning rate. Clipping multiplies by min(1, limit / (norm + 1e-6)).
    """
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))
    clip = jnp.where(p.grad_clip_norm > 0, jnp.minimum(1.0, p.grad_clip_norm / (norm + 1e-6)), 1.0)
    gradients = jax.tree.map(lambda g: g * clip, gradients)
    first = jax.tree.map(lambda m, g: p.keep_first * m + p.new_first * g, first, gradients)
    second = jax.tree.map(lambda v, g: p.keep_second * v + p.new_second * g * g, second, gradients)

    def update(weight: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return weight * p.decay - p.step_size * m / (jnp.sqrt(v) / p.root_correction + p.eps)

    return jax.tree.map(update, weights, first, second), first, second, norm


def _over_stack(function: Any, base: Any, adapters: tuple[Adapter, ...], tiles: tuple[TileArrays, ...]) -> list[Any]:
    """`function` of each adapter with its tile, as one `vmap`; a stack of one keeps plain, unbatched GEMMs.

    Loops over needed tokens are as long for every tile as for the one that needs the most: their length is no batch.
    """
    if len(tiles) == 1:
        return [function(base, adapters[0], jax.tree.map(jnp.asarray, tiles[0]))]
    adapter, stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *zip(adapters, tiles, strict=True))
    trained, read = stack.trained.max(), stack.read.max()

    def one(adapter: Adapter, tile: TileArrays) -> Any:
        return function(base, adapter, tile._replace(trained=trained, read=read))

    results = jax.vmap(one)(adapter, stack)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], results) for i in range(len(tiles))]


def _loss_inputs(tile: TileArrays, scores: dict[Output, jax.Array]) -> LossInputs:
    """What losses read, as one row. With several targets per token their weighted sum is the log-probability."""
    logprobs = scores.get("logprobs", jnp.zeros(tile.targets.shape))
    if logprobs.shape[-1] == 1:
        logprob, weights = logprobs[:, 0], tile.weights[:, 0]
    else:
        logprob = (logprobs * tile.weights).sum(-1)
        weights = jnp.ones_like(logprob)
    tokens = {**tile.inputs, **scores, "logprobs": logprob, "weights": weights}
    row = jax.tree.map(lambda leaf: leaf[None], tokens)
    return LossInputs(segments=tile.segments[None], num_segments=MAX_SEGMENTS, **row)
