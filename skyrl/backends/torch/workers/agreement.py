"""Agreement of ranks before the first collective of a command: all run the same command and can execute it.

A rank that cannot execute its part reports this before other ranks wait for it, so only the command fails. A later
failure leaves other ranks in the middle of a collective, so the group is lost.
"""

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(days=1)
"""Timeout of collectives. The driver's own timeouts are shorter."""


class NotBegun(Exception):
    """A command that this rank did not start because another rank cannot execute its part and reports the reason."""


class DifferentPlans(Exception):
    """Ranks got commands that do not take part in the same collectives. No rank has started."""


class Agreement:
    """Ranks that start a command all together, or not at all.

    Args:
        group: Process group of these ranks, with tensors on the host.
    """

    def __init__(self, group: Any):
        self._group = group

    def refusal(self, plan: Any, failure: Exception | None) -> Exception | None:
        """Return the reason not to start a command, or None if all ranks start it. Collective.

        Args:
            plan: The part of the command that must be equal on all ranks.
            failure: Reason why this rank cannot execute its part, or None. It is returned.

        Raises:
            RuntimeError: Another rank has exited.
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
    """Process group of all ranks on the host, whatever their devices. Collective."""
    return dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)


def host_subgroup(size: int) -> Any:
    """Process group on the host of `size` consecutive ranks that include this one. Collective over all ranks."""
    return dist.new_subgroups(group_size=size, backend="gloo", timeout=COLLECTIVE_TIMEOUT)[0]


def signature(plan: Any) -> int:
    """Checksum of a command: its names, numbers, and shapes of arrays."""
    return zlib.crc32(repr(_shape_of(plan)).encode())


def _shape_of(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Sequence):
        return [_shape_of(each) for each in value]
    return type(value).__name__
