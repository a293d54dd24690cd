"""Agreement of ranks on the host before the first collective of a command: all do the same, and all can.

A rank that cannot do its part says so before anyone waits for it, so that only the command fails. What fails later
leaves others in the middle of a collective, and loses the group.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


class NotBegun(Exception):
    """A command that this rank has not begun, as another rank cannot do its part. That one's failure says why."""


class DifferentPlans(Exception):
    """Ranks were given commands that do not meet in the same collectives. None has begun."""


class Agreement:
    """Ranks that begin a command together, or not at all.

    Args:
        group: Process group of them whose tensors are on the host.
    """

    def __init__(self, group: Any):
        self._group = group

    def refusal(self, plan: Any, failure: Exception | None) -> Exception | None:
        """Return why this rank does not begin a command, or None if all ranks do. All call it at once.

        Args:
            plan: What has to be the same on all ranks.
            failure: Why this rank cannot do its part; it is then its answer.

        Raises:
            RuntimeError: Another rank has gone.
        """
        own = torch.tensor([signature(plan), failure is not None], dtype=torch.int64)
        ranks = [torch.zeros_like(own) for _ in range(self._group.size())]
        self._group.allgather([ranks], [own]).wait()
        if failure is not None:
            return failure
        plans, unable = zip(*(rank.tolist() for rank in ranks), strict=True)
        if any(unable):
            return NotBegun(f"rank {unable.index(True)} of those that compute this together cannot do its part")
        if len(set(plans)) > 1:
            return DifferentPlans(f"ranks were given different commands (checksums {list(plans)}); none has begun")
        return None


def host_group() -> Any:
    """Process group of all ranks on the host, whatever their devices. All call it at once."""
    return dist.new_group(backend="gloo")


def host_subgroup(size: int) -> Any:
    """Process group on the host of `size` consecutive ranks, this one among them. All ranks call it at once."""
    return dist.new_subgroups(group_size=size, backend="gloo")[0]


def signature(plan: Any) -> int:
    """Checksum of a command: its names, numbers, and the shapes of its arrays."""
    return zlib.crc32(repr(_shape_of(plan)).encode())


def _shape_of(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Sequence):
        return [_shape_of(each) for each in value]
    return type(value).__name__
