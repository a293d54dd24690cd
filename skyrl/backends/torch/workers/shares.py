"""Distribution of buffers over ranks: replicated, sharded, partial sums, or a part of each parameter.

Ranks call the same methods in the same order.
"""

from collections.abc import Callable, Generator, Mapping
from math import ceil, prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl.backends.common.models.kind import VALUE_HEAD, Kind
from skyrl.backends.common.models.training_files import BufferName
from skyrl.backends.torch.base_model.lora import Layout
from skyrl.backends.torch.base_model.model import LoadedModel
from skyrl.types import LoraConfig
from skyrl.utils.files.atomic_folders import write_part
from skyrl.utils.files.tensor_file import Tensor as StoredTensor
from skyrl.utils.files.tensor_file import tensor_file

Spread = Literal["replicated", "sharded", "partial", "by_parameter"]
"""Placement of a buffer: all values on each rank, a share of the values, partial sums, or a part of each parameter."""
BLOCK = 2**24
"""Numbers that are read from a file at a time."""


class Shares:
    """This rank's parts of flat buffers, and conversions to and from whole buffers.

    Args:
        model: The base model, whose parameters may be sharded.
        rank: Number of the rank.
        world: Number of ranks.
    """

    def __init__(self, model: LoadedModel, rank: int, world: int):
        self._model, self._device = model, model.device
        self._rank, self._world = rank, world

    def layouts(self, size: int) -> tuple[Layout, Layout]:
        """Layout of a full model with `size` parameters, and layout of this rank's parts of it."""
        has_head = size > sum(prod(shape) for shape in self._model.base.shapes.values())
        kind = Kind(LoraConfig(rank=0), value_head=has_head)
        return self._model.layout(kind), self._model.part_layout(kind)

    def joined(self, parts: Tensor, size: int) -> np.ndarray | None:
        """Gather a whole buffer on the first rank, one parameter at a time. None on other ranks."""
        layout, own = self.layouts(size)
        whole = np.empty(size if self._rank == 0 else 0, np.float32)
        start = 0
        for (name, view), part in zip(own.views(parts).items(), layout.parts, strict=True):
            joined = view if name == VALUE_HEAD else self._model.base.joined(view, part.shape)
            if self._rank == 0:
                whole[start : start + joined.numel()] = joined.reshape(-1).cpu().numpy()
            start += joined.numel()
        return whole if self._rank == 0 else None

    def write(self, parts: Tensor, path: Path, buffer: BufferName, size: int) -> dict[str, Any]:
        """Write this rank's parts of a buffer. Only the first rank writes replicated tensors.

        Returns the entry of the file in its folder's manifest. Raises `StorageError`.
        """
        views = self.layouts(size)[1].views(parts)
        if self._rank > 0:
            views.pop(VALUE_HEAD, None)
        float32 = np.dtype(np.float32)
        tensors = {
            f"{buffer}/{name}": StoredTensor(tuple(view.shape), float32, lambda view=view: view.cpu().numpy())
            for name, view in views.items()
        }
        return write_part(path, tensor_file(tensors))

    def share(self, size: int) -> int:
        """Number of values of a sharded buffer on each rank."""
        return ceil(size / self._world)

    def own(self, flat: Tensor) -> Tensor:
        """This rank's share of a buffer."""
        if self._world == 1:
            return flat
        share = self.share(len(flat))
        part = flat[self._rank * share : (self._rank + 1) * share]
        return torch.nn.functional.pad(part, (0, share - len(part)))

    def gathered(self, share: Tensor, size: int) -> Tensor:
        """Gather a whole buffer from the shares of all ranks."""
        if self._world == 1:
            return share
        whole = torch.empty(self._world * len(share), device=self._device)
        dist.all_gather(list(whole.chunk(self._world)), share)
        return whole[:size].clone()

    def summed(self, part: Tensor | None, size: int) -> Tensor:
        """Sum of partial buffers over ranks; None counts as zero."""
        if self._world == 1 and part is not None:
            return part
        part = torch.zeros(size, device=self._device) if part is None else part.clone()
        if self._world > 1:
            dist.all_reduce(part)
        return part


Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a buffer's tensors, in the order of its layout."""
Read = Callable[[str, int, int], np.ndarray]
"""Returns the numbers from a first to before a last index of a tensor as a flat array, float32."""


def part_of(shapes: Shapes, read: Read, spread: Spread, place: int, count: int) -> Tensor:
    """Return the result of `parts_of` on the CPU."""
    parts = parts_of(shapes, read, spread, place, count, torch.device("cpu"))
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


def parts_of(
    shapes: Shapes, read: Read, spread: Spread, place: int, count: int, device: torch.device
) -> Generator[int, None, Tensor]:
    """Make the values of a buffer that the rank at a place holds, float32 `[part]`. Yields bytes that were read.

    Args:
        shapes: Shapes of the buffer's tensors.
        read: Reads numbers of a tensor.
        spread: Placement of the buffer. If it is "partial", the first rank holds all values.
        place: Position of the rank among those that hold one part each.
        count: Number of parts.
        device: Device of the result.
    """
    ranges = _ranges_of(shapes, spread, place, count)
    size = ceil(sum(map(prod, shapes.values())) / count) if spread == "sharded" else sum(b - a for _, a, b in ranges)
    part, done = torch.zeros(size, device=device), 0
    for name, first, last in ranges:
        for begin in range(first, last, BLOCK):
            end = min(last, begin + BLOCK)
            part[done : done + end - begin] = torch.tensor(read(name, begin, end))
            done += end - begin
            yield 4 * (end - begin)
    return part


def _ranges_of(shapes: Shapes, spread: Spread, place: int, count: int) -> list[tuple[str, int, int]]:
    """(name, first, last) numbers of each tensor in the part of a rank. By parameter, these are rows as in FSDP2."""
    ranges, start = [], 0
    share = ceil(sum(map(prod, shapes.values())) / count)
    for name, shape in shapes.items():
        size = prod(shape)
        bounds = 0, size
        if spread == "by_parameter" and name != VALUE_HEAD:
            rows = ceil(shape[0] / count) * prod(shape[1:])
            bounds = place * rows, (place + 1) * rows
        elif spread == "sharded":
            bounds = place * share - start, (place + 1) * share - start
        first, last = (min(max(bound, 0), size) for bound in bounds)
        ranges.append((name, first, last))
        start += size
    return ranges
