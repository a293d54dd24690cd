"""Copies between host and device. The host waits for a GPU only in `on_host`.

These are the only functions with pinned memory and with copies that do not wait for the GPU.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device: integers as int64, other types as they are. Does not wait for earlier work."""
    values = values.astype(np.int64) if values.dtype.kind in "iu" else values
    if device.type != "cuda":
        return torch.tensor(values, device=device)
    return torch.from_numpy(np.ascontiguousarray(values)).pin_memory().to(device, non_blocking=True)


def on_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Copy tensors of one device to the host, in one transfer."""
    tensors = [x.detach() for x in tensors]
    if all(x.device.type == "cpu" for x in tensors):
        return [x.numpy().copy() for x in tensors]
    parts = [x.contiguous().reshape(-1).view(torch.uint8) for x in tensors]
    whole = torch.cat(parts).cpu().numpy()
    ends = np.cumsum([0, *(len(part) for part in parts)])
    types = [torch.empty(0, dtype=x.dtype).numpy().dtype for x in tensors]
    return [
        whole[start:end].copy().view(dtype).reshape(x.shape)
        for (start, end), dtype, x in zip(pairwise(ends), types, tensors, strict=True)
    ]


def number(value: Tensor) -> float:
    """Read a single value."""
    return float(on_host([value])[0])


def parked(values: Tensor) -> Tensor:
    """Copy a tensor to host memory from which a GPU can read it directly."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda).copy_(values)
