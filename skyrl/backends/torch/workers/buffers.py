"""Flat buffers of a rank, by handles that the driver gives."""

from torch import Tensor


class Buffers:
    """Buffers of one rank. One that could not be made fails the commands that use it, and no others.

    Args:
        rank: Its number.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self._made: dict[int, Tensor] = {}
        self._failed: dict[int, Exception] = {}

    def __contains__(self, handle: int) -> bool:
        return handle in self._made or handle in self._failed

    def __getitem__(self, handle: int) -> Tensor:
        if handle in self._failed:
            error = self._failed[handle]
            raise RuntimeError(
                f"rank {self._rank} could not make a buffer of this model: {type(error).__name__}: {error}"
            ) from error
        if handle not in self._made:
            raise RuntimeError(f"rank {self._rank} has no buffer {handle}: it was freed or never made")
        return self._made[handle]

    def __setitem__(self, handle: int, values: Tensor) -> None:
        self._made[handle] = values

    def get(self, handle: int | None) -> Tensor | None:
        """A buffer, or None if this rank has not made it."""
        return self[handle] if handle is not None and handle in self else None

    def fail(self, handle: int, error: Exception) -> None:
        """Remember why a buffer was not made."""
        self._failed[handle] = error

    def free(self, handle: int) -> None:
        """Forget a buffer."""
        self._made.pop(handle, None)
        self._failed.pop(handle, None)
