"""Losses as users write them, and the packed row that traced ones are computed on beside torch, datum by datum."""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph, trace_loss

from skyrl.algorithms.checks.traced import check_traced_data
from skyrl.algorithms.traced.graph import specification_of
from skyrl.algorithms.traced.objective import TracedObjective, traced_objective
from skyrl.backends.common.packing import TileArrays, TileShape, make_tiles
from skyrl.types import Datum

LENGTHS = (5, 3, 9, 2)
VOCABULARY = 50


def policy_gradient(logprobs, advantages, old):
    ratio = torch.exp(logprobs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/clipped:sum": (ratio != clipped).float().sum()}


def sequence_ratio(logprobs, old, advantage):
    log_ratio = (logprobs - old).sum() / logprobs.shape[0]
    return -torch.exp(log_ratio) * advantage, {}


def masked_mean(logprobs, mask):
    return -(logprobs * mask).sum() / mask.sum().clamp(min=1), {"custom/tokens:sum": mask.sum()}


def to_go(logprobs, rewards):
    later = torch.flip(torch.cumsum(torch.flip(rewards, [0]), 0), [0])
    centred = (later - later.mean()) / (later.std() + 1e-4)
    return -(centred.detach() * logprobs).sum(), {}


def smoothness(logprobs):
    steps = logprobs[1:] - logprobs[:-1]
    return (steps**2).mean() + steps.abs().sum() / math.sqrt(steps.numel()) + logprobs[-1] - 2 * logprobs[0], {}


def entropic(logprobs, mask):
    shares = torch.softmax(logprobs, dim=0)
    loss = (shares * torch.log_softmax(logprobs, 0)).sum() + torch.logsumexp(logprobs.masked_fill(mask > 0, -1e4), 0)
    return loss + logprobs.amax() - logprobs.min() + logprobs.var(unbiased=False), {}


def bounded(logprobs, old):
    difference = logprobs - old
    loss = F.softplus(3 * difference) + F.logsigmoid(difference) + torch.sigmoid(difference) + F.relu(difference)
    loss = torch.where((difference > 0) & ~(difference > 2), loss, -loss) + torch.expm1(difference).tanh()
    return loss.sum() + F.huber_loss(logprobs, old) + F.mse_loss(logprobs, old, reduction="sum"), {}


def distillation(logprobs, teacher, mask):
    kl = (torch.softmax(teacher, -1) * (torch.log_softmax(teacher, dim=-1) - torch.log_softmax(logprobs, -1))).sum(-1)
    return (kl * mask).sum() / mask.sum(), {"custom/kl:mean": kl.mean(), "custom/k:sum": logprobs[:, 0].sum()}


def columns(logprobs, teacher):
    top = logprobs.amax(dim=-1, keepdim=True)
    centred = (logprobs - top) * teacher
    return centred.sum() / centred.numel() + centred[1:, 1].mean() + torch.exp(logprobs).sum(1).log().sum(), {}


RANKS = {"advantage": 0, "teacher": 2}
OF_TOKENS = [policy_gradient, sequence_ratio, masked_mean, to_go, smoothness, entropic, bounded]
OF_TARGETS = [distillation, columns]


def trace(loss: Callable, wide: bool = False) -> tuple[LossHandle, TracedObjective]:
    """The SDK's handle of a loss, and what the server makes of what the SDK sends."""
    names = loss.__code__.co_varnames[: loss.__code__.co_argcount]
    ranks = {name: 2 if wide and name == "logprobs" else RANKS.get(name, 1) for name in names}
    handle = trace_loss(loss, ranks, "session")
    nodes = [node.model_dump(exclude_none=True) for node in encode_graph(handle).nodes]
    return handle, traced_objective(specification_of([(one.name, one.rank) for one in handle.inputs], nodes))


def data_for(objective: TracedObjective, seed: int = 0, lengths=LENGTHS) -> list[Datum]:
    """Checked datums with random inputs, as many targets per token in each as its number and two."""
    draw, data = np.random.default_rng(seed), []
    ranks = dict(objective.graph.inputs)
    for i, length in enumerate(lengths):
        shapes = [(), (length,), (length, i + 2)]
        inputs = {name: draw.normal(size=shapes[rank]).astype(np.float32) for name, rank in list(ranks.items())[1:]}
        if "mask" in inputs:
            inputs["mask"] = (draw.random(length) < 0.6).astype(np.int64)
            inputs["mask"][0] = 1
        targets = draw.integers(0, VOCABULARY, shapes[ranks["logprobs"]])
        data.append(Datum(draw.integers(0, VOCABULARY, length), {"target_tokens": targets, **inputs}))
    return data


def tile_of(objective: TracedObjective, data: list[Datum]) -> tuple[TileArrays, list[slice], list[int]]:
    """One tile with all data, and the cells and the number of each of its datums."""
    checked = check_traced_data(data, objective, vocab_size=VOCABULARY, max_context_length=64)
    (tile,) = make_tiles(checked, objective, {}, TileShape(tokens=32))
    cells = [slice(place.start, place.start + place.length) for place in tile.placements]
    return tile.arrays, cells, [place.datum for place in tile.placements]


def torch_result(handle: LossHandle, datum: Datum, logprobs: np.ndarray) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, gradient and metrics of one datum: the SDK's graph, run by torch in float64."""
    leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    inputs = [torch.tensor(datum.loss_fn_inputs[name]) for name in handle.input_names]
    loss, metrics = handle.graph(leaf, *(x.double() if x.is_floating_point() else x for x in inputs))
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad.numpy(), {name: float(value.detach()) for name, value in metrics.items()}
