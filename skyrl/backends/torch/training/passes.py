"""A training pass over one tile, and optimizer steps, as functions of tensors."""

import operator
from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skyrl.algorithms.losses import LOSSES, LossInputs
from skyrl.algorithms.objective import Objective, Output, PolicyObjective
from skyrl.algorithms.traced.objective import measured
from skyrl.backends.common.adamw import AdamScalars
from skyrl.backends.common.dimuon import DimuonScalars, matrix_sign
from skyrl.backends.common.models.kind import VALUE_HEAD
from skyrl.backends.common.packing import TileArrays
from skyrl.backends.common.pass_output import PassOutput
from skyrl.backends.torch.base_model.attention import Packed
from skyrl.backends.torch.base_model.model import LoadedModel, Weights
from skyrl.backends.torch.base_model.transfers import on_device, on_host
from skyrl.backends.torch.training.scores import Scoring, token_scores

PG_LOSS, ENTROPY_LOSS = "pg_loss:sum", "entropy_loss:sum"
"""Metrics of a policy objective: the sum of its policy term, and the sum of entropies times token weights."""


class TileOutput(NamedTuple):
    """Outputs of a tile on the device, for its used cells. `read_outputs` copies them to the host."""

    size: int
    """Number of cells of the tile."""
    losses: Tensor
    scores: dict[Output, Tensor]
    metrics: dict[str, Tensor]


def run_tile(
    model: LoadedModel,
    weights: Weights | None,
    tile: TileArrays,
    objective: Objective | None,
    forward_only: bool,
    scoring: Scoring,
    idle: bool = False,
) -> tuple[TileOutput | Exception, dict[str, Tensor]]:
    """Compute a tile. Returns its outputs, and the gradients of this rank's weights by name (none if `forward_only`).

    An exception in the loss is returned, not raised: ranks that compute together still complete the backward pass.

    Args:
        model: The base model.
        weights: Trained weights to compute with, an adapter or all weights. None: the base model alone.
        tile: The tile. Its sequences start at position 0, without padding before them.
        objective: Objective to compute. None: the loss of the Tinker protocol with index `tile.loss_index`.
        forward_only: True for a pass without gradients.
        scoring: As in `token_scores`.
        idle: If True, this rank only takes part in collectives, with zero gradients.
    """
    leaves: dict[str, Tensor] = {}
    if weights is not None and not forward_only:
        leaves = {
            name: x.detach().requires_grad_()
            for name, x in weights.tensors.items()
            if name == VALUE_HEAD or not weights.kind.is_whole
        }
        weights = Weights(weights.kind, {**weights.tensors, **leaves})
    head = None
    if weights is not None and VALUE_HEAD in weights.tensors:
        head = model.tensor_ranks.once(weights.tensors[VALUE_HEAD])

    outputs = ("logprobs",) if objective is None else objective.outputs

    metrics: dict[str, Tensor] = {}
    share = model.ranks.share(tile)

    def compute() -> tuple[Tensor, Tensor, dict[Output, Tensor]] | tuple[Tensor, Exception, None]:
        hidden = _hidden(model, tile, share)
        total = _zero(model, hidden) if model.meets_others else hidden.new_zeros(())
        try:
            scores = _scores_of_all(model, hidden, head, tile, share, outputs, scoring)
            losses, of_sequences = _losses(model, scores, tile, objective)
            metrics.update(of_sequences)
        except Exception as error:
            return total, error, None
        if not idle:
            total = total + losses.sum()
        return total, losses.detach(), {name: x.detach() for name, x in scores.items()}

    with model.using(weights, not forward_only, share.dropout), torch.set_grad_enabled(not forward_only):
        total, losses, scores = model.base.run(compute)
        if total.requires_grad:
            total.backward()
    gradients: dict[str, Tensor] = {}
    if weights is not None and not forward_only:
        for name, x in weights.tensors.items():
            gradient = leaves[name].grad if name in leaves else model.base.gradient(name)
            gradients[name] = torch.zeros_like(x) if gradient is None else gradient
    if scores is None:
        assert isinstance(losses, Exception)
        return losses, gradients
    assert isinstance(losses, Tensor)
    of_metrics = {name: values.detach().float() for name, values in metrics.items()}
    return TileOutput(len(tile.tokens), losses, scores, of_metrics), gradients


def read_outputs(outputs: Sequence[TileOutput]) -> list[PassOutput]:
    """Copy outputs of tiles to the host, in one transfer."""
    tensors = [x for one in outputs for x in (one.losses, *one.scores.values(), *one.metrics.values())]
    arrays = iter(on_host([x.float() for x in tensors]))
    found = []
    for one in outputs:
        losses = _padded(next(arrays), one.size)
        scores: dict[Output, np.ndarray] = {name: _padded(next(arrays), one.size) for name in one.scores}
        found.append(PassOutput(losses, scores, {name: next(arrays) for name in one.metrics}))
    return found


def _zero(model: LoadedModel, hidden: Tensor) -> Tensor:
    """Zero that depends on all weights, so that a backward pass has the same collectives whatever the loss uses."""
    return 0 * (hidden.float().sum() + model.logits(hidden[:1]).float().sum())


def _placed(model: LoadedModel, array: np.ndarray, used: int) -> Tensor:
    return on_device(array[:used], model.device)


def _hidden(model: LoadedModel, tile: TileArrays, share: TileArrays) -> Tensor:
    """Hidden states `[tokens, hidden]` of the used cells of this rank's share."""
    used = int(share.read)
    tokens, positions = _placed(model, share.tokens, used), _placed(model, share.positions, used)
    lengths = np.bincount(tile.segments[: int(tile.read)]).tolist()
    return model.hidden(tokens[None], positions[None], Packed(lengths, model.ranks))[0]


def _scores_of_all(
    model: LoadedModel,
    hidden: Tensor,
    value_head: Tensor | None,
    tile: TileArrays,
    share: TileArrays,
    outputs: Sequence[Output],
    scoring: Scoring,
) -> dict[Output, Tensor]:
    """Scores of all used cells. Each rank computes the scores of its share."""
    if model.ranks.size == 1:
        return _scores(model, hidden, value_head, share, outputs, scoring)
    widths = [share.targets.shape[1] if name == "logprobs" else 1 for name in outputs]
    failure = None
    try:
        scores = _scores(model, hidden, value_head, share, outputs, scoring)
        columns = torch.cat([scores[name].view(len(hidden), -1) for name in outputs], 1)
    except Exception as error:  # other ranks wait for this one; the failure is raised after the gather
        failure = error
        columns = torch.zeros(len(hidden), sum(widths), device=model.device)
    whole = model.ranks.gathered(columns)[: int(tile.read)]
    if failure is not None:
        raise failure
    parts = dict(zip(outputs, whole.split(widths, 1), strict=True))
    return {name: part if name == "logprobs" else part[:, 0] for name, part in parts.items()}


def _scores(
    model: LoadedModel,
    hidden: Tensor,
    value_head: Tensor | None,
    tile: TileArrays,
    outputs: Sequence[Output],
    scoring: Scoring,
) -> dict[Output, Tensor]:
    """Scores that the loss needs, for used cells."""
    used, trained = int(tile.read), int(tile.trained)
    scores: dict[Output, Tensor] = {}
    if "logprobs" in outputs:
        targets = _placed(model, tile.targets, used)
        temperature = None if tile.temperature is None else _placed(model, tile.temperature, used)
        order = _placed(model, tile.order, used)
        parts = []
        for cells, with_gradient in ((order[:trained], True), (order[trained:], False)):
            if not len(cells):
                continue
            with torch.set_grad_enabled(with_gradient and torch.is_grad_enabled()):
                some = None if temperature is None else temperature[cells]
                parts.append(
                    token_scores(model.logits, hidden[cells], targets[cells], some, "entropy" in outputs, scoring)
                )
        back = torch.argsort(order)
        scores["logprobs"] = torch.cat([part.logprobs for part in parts])[back]
        if "entropy" in outputs:
            scores["entropy"] = torch.cat([part.entropy for part in parts if part.entropy is not None])[back]
    if "values" in outputs:
        assert value_head is not None
        scores["values"] = hidden.float() @ value_head
    return scores


def _losses(
    model: LoadedModel, scores: dict[Output, Tensor], tile: TileArrays, objective: Objective | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss `[tokens]` of used cells, and metrics: `[sequences]` for a traced loss, `[1]` for a policy objective."""
    used = int(tile.read)
    segments = tile.segments[:used]
    weights = _placed(model, tile.weights, used)
    logprob, weight = torch.zeros_like(weights[:, 0]), weights[:, 0]
    if "logprobs" in scores:
        logprob = scores["logprobs"][:, 0]
        if weights.shape[1] > 1:  # the log-probability is their weighted sum
            logprob, weight = (scores["logprobs"] * weights).sum(-1), torch.ones_like(logprob)
    given = {name: _placed(model, x, used) for name, x in tile.inputs.items()}
    fields = {**given, **scores, "logprobs": logprob, "weights": weight}
    named = None
    if tile.named is not None:
        named = {name: _placed(model, x, used)[None] for name, x in tile.named.items()}
        named["logprobs"] = (logprob if weights.shape[1] == 1 else scores["logprobs"])[None]
    x = LossInputs(
        segments=on_device(segments, model.device)[None],
        num_segments=int(segments.max()) + 1,
        named=named,
        **{name: value[None] for name, value in fields.items()},
    )
    if isinstance(objective, PolicyObjective):
        terms = objective.terms(x)
        entropy = x.weights.new_zeros(1) if x.entropy is None else x.weights * x.entropy
        metrics = {PG_LOSS: terms["policy"], ENTROPY_LOSS: entropy}
        total = reduce(operator.add, terms.values())
        return total[0], {name: values.detach().sum()[None] for name, values in metrics.items()}
    if objective is not None:
        losses, metrics = measured(objective, x)
        return losses[0], {name: values[0] for name, values in metrics.items()}
    loss = LOSSES[list(LOSSES)[int(tile.loss_index)]]
    knobs = dict(zip(loss.knobs, tile.knobs.tolist(), strict=False))
    return loss(x, **knobs)[0], {}


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    """Values of used cells, followed by zeros."""
    whole = np.zeros((size, *values.shape[1:]), np.float32)
    whole[: len(values)] = values
    return whole


def dimuon(weights: Tensor, momentum: Tensor, shapes: Sequence[tuple[int, ...]], p: DimuonScalars) -> Tensor:
    """New weights after one step of `skyrl.backends.common.dimuon`.

    Args:
        weights: Flat float32 weights of the whole model.
        momentum: Flat momentum, after this step's gradients.
        shapes: Shapes of the matrices in both buffers, in order.
        p: Hyperparameters.
    """
    pieces = momentum.split([prod(shape) for shape in shapes])
    signs = [matrix_sign(piece.view(shape)).reshape(-1) for piece, shape in zip(pieces, shapes, strict=True)]
    return weights - float(p.learning_rate) * torch.cat(signs)


def adamw(
    weights: Tensor, gradients: Tensor | None, first: Tensor, second: Tensor, p: AdamScalars, norm: float
) -> tuple[Tensor, Tensor, Tensor]:
    """New weights, first and second moments after one AdamW step, as `torch.optim.AdamW` after `clip_grad_norm_`.

    Gradients are divided by `gradient_divisor` before clipping.

    Args:
        weights: Flat float32 weights; this rank's part of them if workers share the model. The other tensors have the
            same form.
        gradients: Gradient sums; None: zero.
        first: First moment.
        second: Second moment.
        p: Hyperparameters.
        norm: Global gradient norm of the whole model, after division by `gradient_divisor`.

    Source: Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101, algorithm 2.
    """
    scalars = AdamScalars(*(float(value) for value in p))
    taken = torch.zeros_like(weights) if gradients is None else gradients
    clip = min(1.0, scalars.grad_clip_norm / (norm + 1e-6)) if scalars.grad_clip_norm > 0 else 1.0
    scale = clip / scalars.gradient_divisor
    if scale != 1.0:
        taken = taken * scale
    first = first * scalars.keep_first + taken * scalars.new_first
    second = second * scalars.keep_second + taken * taken * scalars.new_second
    root = second.sqrt().div_(scalars.root_correction).add_(scalars.eps)  # in place, for `memory.IN_A_STEP`
    step = (first * scalars.step_size).div_(root)
    del root
    return (weights * scalars.decay).sub_(step), first, second
