"""Time of a step by a roofline: the longest of computing, reading memory and exchanging data, as if each had no others.

Real programs reach a part of it, so a rate is a range (`TRAINING`, `DECODING`). The ranges are assumptions. That of
training includes published runs of other systems (tests/backends/test_plan.py).
Source of the model: Williams et al. 2009, https://doi.org/10.1145/1498765.1498785.
"""

from typing import NamedTuple

from skyrl.backends.planning import flops
from skyrl.backends.planning.devices import Devices
from skyrl.backends.planning.estimate import Estimate, Exchange, Step

TRAINING, DECODING = (0.25, 0.7), (0.2, 0.7)
"""Assumed efficiency: parts of the roofline's rate that programs reach."""
AGAIN = 4 / 3
"""Products of a training call that computes layers again, relative to one that does not: of full training, three
passes become four."""
AGAIN_ADAPTERS = 3 / 2
"""The same for adapters, whose base weights have no gradients: two passes become three."""

FLOAT32_GRADIENTS = 2
"""Bytes of float32 gradients that are reduced, relative to those of bfloat16 weights."""


class Rate(NamedTuple):
    """Rate of training or of decoding, on all devices."""

    flops: int
    """Operations of a token."""
    tokens: int
    """Tokens of the steps that all devices compute at the same time."""
    memory_bytes: int
    """Bytes that a device reads of its memory in a step."""
    exchanged_bytes: int
    """Bytes that a device receives in a step."""
    low: float
    """Tokens per second."""
    high: float
    limit: str
    """The longest of the three."""


def training_rate(estimate: Estimate, devices: Devices, length: int, full: bool) -> Rate | None:
    """Rate of training on sequences of `length` tokens; None if work or speeds are unknown.

    Args:
        estimate: The layout.
        devices: The devices.
        length: Tokens of a sequence.
        full: True if all weights are trained, False for an adapter.
    """
    shape = estimate.shape
    if shape is None or not devices.kind.tflops:
        return None
    passes = (
        flops.full_forward_backward(shape, length) if full else flops.forward_backward(shape, estimate.rank, length)
    )
    again = AGAIN if full else AGAIN_ADAPTERS
    slow, fast = {True: (again, again), False: (1.0, 1.0), None: (again, 1.0)}[estimate.recomputes]
    step = estimate.training
    if full:
        more = (one._replace(times=FLOAT32_GRADIENTS) for one in step.exchanges if one.of == "weights")
        others = (one for one in step.exchanges if one.of != "adapters")
        step = step._replace(exchanges=(*others, *more))
    read = 2 * step.read
    return _rate(estimate, devices, step, passes // length, read, slow, fast, TRAINING)


def decoding_rate(estimate: Estimate, devices: Devices, length: int) -> Rate | None:
    """Rate of decoding in the middle of sequences of `length` tokens; None if work or speeds are unknown."""
    shape, step, context = estimate.shape, estimate.decoding, max(1, length // 2)
    if shape is None or not devices.kind.tflops:
        return None
    rows = min(step.tokens, max(1, estimate.plan.cache // max(1, estimate.token_bytes * length)))
    step = step._replace(tokens=rows)
    work = flops.linear(shape, estimate.rank, 1, 1) + 4 * shape.layers * shape.heads * shape.head_dim * context
    return _rate(estimate, devices, step, work, step.read + rows * context * estimate.token_bytes, 1, 1, DECODING)


def _rate(
    estimate: Estimate,
    devices: Devices,
    step: Step,
    work: int,
    read: int,
    slow: float,
    fast: float,
    efficiency: tuple[float, float],
) -> Rate:
    """Rate of a step whose tokens take `work` operations each. `slow`, `fast`: factors of these operations."""
    shape, kind = estimate.shape, devices.kind
    assert shape is not None
    experts = work * shape.expert_parameters() / max(1, shape.layer_parameters() + shape.hidden * shape.vocab)
    own = ((work - experts) + experts / step.expert_ranks) * step.tokens / step.shared
    seconds = {
        "compute": own * slow / (kind.tflops * 1e12),
        "memory bandwidth": read / (kind.memory_gb_s * 1e9) if kind.memory_gb_s else 0.0,
        "links between devices": sum(_link_s(one, kind.link_gb_s) for one in step.exchanges),
        "network between nodes": sum(_network_s(one, devices) for one in step.exchanges),
    }
    limit = max(seconds, key=lambda name: seconds[name])
    tokens = step.tokens * step.at_once
    others = max(value for name, value in seconds.items() if name != "compute")
    return Rate(
        flops=work,
        tokens=tokens,
        memory_bytes=read,
        exchanged_bytes=int(sum(map(_received, step.exchanges))),
        low=efficiency[0] * tokens / max(seconds.values()),
        high=efficiency[1] * tokens / max(others, own * fast / (kind.tflops * 1e12)),
        limit=limit,
    )


def _received(exchange: Exchange) -> float:
    """Bytes that a device receives."""
    return exchange.times * exchange.nbytes * (exchange.ranks - 1) / exchange.ranks


def _link_s(exchange: Exchange, gb_s: float) -> float:
    return _received(exchange) / (gb_s * 1e9) if gb_s else 0.0


def _network_s(exchange: Exchange, devices: Devices) -> float:
    """Seconds in which the networks of nodes deliver what other nodes have, once to each node."""
    kind = devices.kind
    joined = kind.linked or kind.per_node
    span = exchange.ranks * exchange.stride
    if span <= joined or not kind.network_gb_s:
        return 0.0
    islands = min(exchange.ranks, -(-span // joined))
    parallel = min(exchange.stride, joined)  # groups that share the networks
    nbytes = exchange.times * exchange.nbytes * (islands - 1) / islands * parallel
    return nbytes / (kind.network_gb_s * 1e9 * joined / kind.per_node)
