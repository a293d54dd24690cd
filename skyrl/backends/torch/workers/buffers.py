"""Flat buffers of a rank, on the rank's device or temporarily in host memory. The driver assigns their handles.

An offloaded buffer returns to the device when a command computes with it. Other commands read it from host memory.
"""

import torch
from torch import Tensor

from skyrl.backends.torch.base_model.transfers import parked


class Buffers:
    """Buffers of one rank. Failure to create a buffer fails only the commands that use it.

    Args:
        rank: Number of the rank.
        device: Device of the rank.
    """

    def __init__(self, rank: int, device: torch.device):
        self._rank, self._device = rank, device
        self._made: dict[int, Tensor] = {}
        """Buffers on the device."""
        self._away: dict[int, Tensor] = {}
        """Buffers in host memory."""
        self._failed: dict[int, Exception] = {}

    def __contains__(self, handle: int) -> bool:
        return handle in self._made or handle in self._away or handle in self._failed

    def __getitem__(self, handle: int) -> Tensor:
        """A buffer, moved to the device if necessary."""
        if handle in self._away:
            self._made[handle] = self._away[handle].to(self._device, copy=True)
            del self._away[handle]
        return self.wherever(handle)

    def __setitem__(self, handle: int, values: Tensor) -> None:
        self._made[handle] = values
        self._away.pop(handle, None)

    def get(self, handle: int | None) -> Tensor | None:
        """A buffer, or None if this rank has not created it."""
        return self[handle] if handle is not None and handle in self else None

    def wherever(self, handle: int) -> Tensor:
        """A buffer for reading, on the device or in host memory."""
        if handle in self._failed:
            error = self._failed[handle]
            raise RuntimeError(
                f"rank {self._rank} could not make a buffer of this model: {type(error).__name__}: {error}"
            ) from error
        if handle in self._away:
            return self._away[handle]
        if handle not in self._made:
            raise RuntimeError(f"rank {self._rank} has no buffer {handle}: it was freed or never made")
        return self._made[handle]

    def lent(self, handle: int) -> Tensor:
        """A buffer for reading on the device, as a temporary copy if it is in host memory."""
        return self.wherever(handle).to(self._device)

    def is_away(self, handle: int) -> bool:
        """Return True if a buffer is in host memory."""
        return handle in self._away

    def park(self, handle: int, original: int) -> None:
        """Create a buffer in host memory as a copy of another one."""
        self._away[handle] = parked(self.wherever(original))

    def offload(self, *handles: int) -> None:
        """Move buffers to host memory. If one cannot be moved, it and the remaining ones stay on the device."""
        for handle in handles:
            self._away[handle] = parked(self._made[handle])
            del self._made[handle]
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # otherwise this process would keep the memory

    def offload_all(self) -> int:
        """Move all buffers to host memory. Returns the bytes that were moved."""
        there = sum(values.nbytes for values in self._made.values())
        self.offload(*self._made)
        return there

    def fail(self, handle: int, error: Exception) -> None:
        """Record why a buffer could not be created."""
        self._failed[handle] = error

    def free(self, handle: int) -> None:
        """Free a buffer."""
        for held in (self._made, self._away, self._failed):
            held.pop(handle, None)
