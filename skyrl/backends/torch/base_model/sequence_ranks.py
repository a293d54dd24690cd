"""Sequence parallelism: ranks share the tokens of a micro-batch (DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509).

Operations on single tokens run on the rank that holds the token. Attention needs all tokens: an all-to-all before it
exchanges tokens for heads, so that each rank has all tokens of some heads, and another one after it reverses this.
Gradients of weights are sums over a rank's tokens, as with data parallelism.
"""

from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from skyrl.backends.common.packing import TileArrays
from skyrl.errors import RequestError


@dataclass(frozen=True)
class SequenceRanks:
    """Position of a rank among the ranks that share each micro-batch."""

    size: int = 1
    """Number of these ranks."""
    place: int = 0
    group: Any = None
    """Process group of these ranks."""

    def cells(self, count: int) -> np.ndarray:
        """Indices of this rank's share of `count` cells. All shares have the same size, padded with the last cell."""
        share = -(-count // self.size)
        return np.minimum(np.arange(self.place * share, (self.place + 1) * share), count - 1)

    def share(self, tile: TileArrays) -> TileArrays:
        """This rank's share of a micro-batch. Padding has no gradient."""
        if self.size == 1:
            return tile
        used = int(tile.read)
        cells = self.cells(used)
        start = self.place * len(cells)
        own = min(len(cells), max(0, used - start))
        order = tile.order[:used] - start
        here = (order >= 0) & (order < own)
        return tile._replace(
            tokens=tile.tokens[cells],
            positions=tile.positions[cells],
            segments=tile.segments[cells],
            targets=tile.targets[cells],
            weights=tile.weights[cells],
            inputs={name: x[cells] for name, x in tile.inputs.items()},
            order=np.concatenate([order[here], np.arange(own, len(cells), dtype=np.int32)]),
            trained=here[: int(tile.trained)].sum(),
            read=np.asarray(len(cells)),
            temperature=None if tile.temperature is None else tile.temperature[cells],
            dropout=None if tile.dropout is None else tile.dropout.at(self.place),
        )

    def gathered(self, share: Tensor) -> Tensor:
        """Gather the shares of all ranks. All ranks compute the same from the result, so the backward pass is local."""
        return share if self.size == 1 else _Gather.apply(share, self)  # pyright: ignore[reportReturnType]

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange all heads of this rank's tokens for all tokens of its heads, `[1, heads, tokens, width]` each.

        Keys that are used by queries of several ranks are copied to each of them.
        """
        if self.size == 1:
            return query, key, value
        if query.shape[1] % self.size:
            raise RequestError(
                f"sequence_parallel_size={self.size} does not divide the {query.shape[1]} attention heads of the base "
                "model; use a divisor of them"
            )
        repeats = lcm(key.shape[1], self.size) // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        return self._to_heads(query), self._to_heads(key), self._to_heads(value)

    def _to_heads(self, x: Tensor) -> Tensor:
        parts = x[0].unflatten(0, (self.size, -1))  # ranks, heads, tokens, width
        return self._exchanged(parts).transpose(0, 1).flatten(1, 2)[None]

    def to_tokens(self, x: Tensor) -> Tensor:
        """Exchange all tokens of this rank's heads for all heads of its tokens, `[1, tokens, heads, width]`."""
        if self.size == 1:
            return x
        parts = x[0].unflatten(0, (self.size, -1))  # ranks, tokens, heads, width
        return self._exchanged(parts).transpose(0, 1).flatten(1, 2)[None]

    def _exchanged(self, parts: Tensor) -> Tensor:
        return _Exchange.apply(parts, self.group)  # pyright: ignore[reportReturnType]


ALONE = SequenceRanks()
"""A rank with micro-batches of its own."""


def sequence_ranks(size: int, world: int, device: torch.device) -> SequenceRanks:
    """This rank's position if `size` consecutive ranks share each micro-batch. Collective."""
    if size == 1:
        return ALONE
    mesh = init_device_mesh(device.type, (world // size, size), mesh_dim_names=("data", "sequence"))
    group = mesh.get_group("sequence")
    return SequenceRanks(size, dist.get_rank(group), group)


class _Exchange(torch.autograd.Function):
    """All-to-all: sends part i of `[ranks, ...]` to rank i. The backward pass is an all-to-all too."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Exchange.apply(gradient, ctx.group), None


class _Gather(torch.autograd.Function):
    """All-gather along the first dimension. The backward pass returns this rank's part of its own gradient."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.ranks = ranks
        whole = share.new_empty(ranks.size * len(share), *share.shape[1:])
        dist.all_gather(list(whole.chunk(ranks.size)), share.contiguous(), group=ranks.group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.chunk(ctx.ranks.size)[ctx.ranks.place], None
