"""The compiled training programs: pure functions of (base weights, adapters, batch).

A pass maps one tile to outputs and the gradients of the adapter that it belongs to. Tiles may be stacked along a
leading axis, one adapter each: the stack is a `vmap`, so base GEMMs see all tokens at once while each adapter's
gradient comes out on its own and nothing contracts over adapters. A stack of one runs as plain GEMMs. Which loss, its
settings and its inputs are data, so shapes alone decide what is compiled.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from skyrl.algorithms.losses import LossInputs, mixed_loss
from skyrl.backends.batching import MAX_SEGMENTS, TileArrays
from skyrl.backends.jax.adapters import Tree
from skyrl.backends.jax.compilation import Compiler
from skyrl.tx.models.types import Adapter
from skyrl.types import AdamParams

SMALLEST_EPS = float(np.finfo(np.float32).tiny)
"""What is smaller is 0 in float32, and would make 0 / 0 of weights that never had a gradient."""


class PassOutput(NamedTuple):
    """Per token: log-probability of each target `[R, L, K]` and loss `[R, L]`."""

    logprobs: jax.Array
    losses: jax.Array


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
    """Forward, forward-backward and optimizer step of one base model's architecture."""

    def __init__(self, graphdef: Any, loss_chunk_size: int):
        def losses(weights: Tree, scaling: jax.Array, base: Any, tile: TileArrays) -> tuple[jax.Array, PassOutput]:
            adapter = Adapter(weights, scaling)
            model = nnx.merge(graphdef, base)
            hidden = model(tile.tokens, positions=tile.positions, segment_ids=tile.segments, adapter=adapter)
            rows, length, width = tile.targets.shape
            logprobs = model.target_logprobs(
                hidden.last_hidden_state.reshape(rows * length, -1),
                tile.targets.reshape(rows * length, width),
                adapter=adapter,
                chunk_size=loss_chunk_size,
            ).reshape(rows, length, width)
            token_losses = mixed_loss(_loss_inputs(tile, logprobs), tile.loss_index, tile.knobs)
            return token_losses.sum(), PassOutput(logprobs, token_losses)

        def forward(base: Any, adapter: Adapter, tile: TileArrays) -> PassOutput:
            return losses(adapter.weights, adapter.scaling, base, tile)[1]

        def forward_backward(base: Any, adapter: Adapter, tile: TileArrays) -> tuple[PassOutput, Tree]:
            gradients, output = jax.grad(losses, has_aux=True)(adapter.weights, adapter.scaling, base, tile)
            return output, gradients

        def accumulate(
            base: Any, adapters: tuple[Adapter, ...], scratches: tuple[Tree, ...], tiles: tuple[TileArrays, ...]
        ) -> list[tuple[PassOutput, Tree]]:
            results = _over_stack(forward_backward, base, adapters, tiles)
            return [
                (output, jax.tree.map(jnp.add, scratch, gradients))
                for scratch, (output, gradients) in zip(scratches, results, strict=True)
            ]

        self._compiler = Compiler("training")
        self.forward = self._compiler.jit("forward", functools.partial(_over_stack, forward))
        """(base, adapters, tiles) -> a PassOutput for each tile; tiles have one shape."""
        self.forward_backward = self._compiler.jit("forward_backward", accumulate, donate_argnums=2)
        """(base, adapters, scratch gradients, tiles) -> (PassOutput, new scratch) for each tile."""
        self.optim_step = self._compiler.jit("optim_step", adamw)

    @property
    def compiled(self) -> int:
        """Programs compiled so far."""
        return self._compiler.compiled


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
    """`function` of each adapter with its tile, as one `vmap`; a stack of one keeps plain, unbatched GEMMs."""
    if len(tiles) == 1:
        return [function(base, adapters[0], jax.tree.map(jnp.asarray, tiles[0]))]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *zip(adapters, tiles, strict=True))
    results = jax.vmap(function, in_axes=(None, 0, 0))(base, *stack)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], results) for i in range(len(tiles))]


def _loss_inputs(tile: TileArrays, logprobs: jax.Array) -> LossInputs:
    """What losses read. With several targets per token their weighted sum takes the place of the log-probability."""
    if logprobs.shape[-1] == 1:
        logprob, weights = logprobs[..., 0], tile.weights[..., 0]
    else:
        logprob = (logprobs * tile.weights).sum(-1)
        weights = jnp.ones_like(logprob)
    return LossInputs(
        logprobs=logprob, weights=weights, segments=tile.segments, num_segments=MAX_SEGMENTS, **tile.inputs
    )
