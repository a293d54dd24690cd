"""Distribution of buffers over ranks: replicated, sharded, partial sums, or a part of each parameter.

Ranks call the same methods in the same order.
"""

from collections.abc import Mapping
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


def part_of(tensors: Mapping[str, np.ndarray], spread: Spread, place: int, count: int) -> np.ndarray:
    """Values of a buffer that the rank at a place holds, float32 `[part]`, computed in the driver.

    Args:
        tensors: Tensors of the buffer, in the order of its layout.
        spread: Placement of the buffer. If it is "partial", the first rank holds all values.
        place: Position of the rank among those that hold one part each.
        count: Number of parts.
    """
    if spread == "by_parameter":
        tensors = {name: x if name == VALUE_HEAD else _rows_of(x, place, count) for name, x in tensors.items()}
    flat = np.concatenate([tensor.reshape(-1) for tensor in tensors.values()]).astype(np.float32, copy=False)
    if spread != "sharded":
        return flat
    share = ceil(len(flat) / count)
    part = flat[place * share : (place + 1) * share]
    return np.pad(part, (0, share - len(part)))


def _rows_of(tensor: np.ndarray, place: int, count: int) -> np.ndarray:
    """Rows of a parameter in a shard, as FSDP2 distributes them."""
    rows = ceil(len(tensor) / count)
    return tensor[place * rows : (place + 1) * rows]
