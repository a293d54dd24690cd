"""Snapshot of a process's memory: its tensors, and the segments of CUDA's allocator."""

import gc
import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch


def write_snapshot(path: Path) -> None:
    """Write a snapshot of this process to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(snapshot(), indent=1))


def snapshot() -> dict[str, Any]:
    """Tensors by device, dtype and shape, largest groups first, and segments of CUDA's allocator if it is in use.

    Memory that several tensors share is counted once, in the group of the largest of them.
    """
    groups: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    sizes: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for tensor in _largest_by_storage().values():
        key = str(tensor.device), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        groups[key] += 1
        sizes[key] += tensor.untyped_storage().nbytes()
    tensors = [
        {"device": device, "dtype": dtype, "shape": shape, "count": groups[device, dtype, shape], "bytes": size}
        for (device, dtype, shape), size in sizes.most_common()
    ]
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_initialized() else []
    return {"bytes": sum(sizes.values()), "tensors": tensors, "cuda_segments": segments}


def _largest_by_storage() -> dict[int, torch.Tensor]:
    """The largest tensor of each storage."""
    found: dict[int, torch.Tensor] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when their class is read
        for thing in gc.get_objects():
            if (
                not issubclass(type(thing), torch.Tensor)
                or thing.device.type == "meta"
                or thing.layout != torch.strided
            ):
                continue
            key = thing.untyped_storage().data_ptr()
            if key and (key not in found or found[key].numel() < thing.numel()):
                found[key] = thing
    return found
