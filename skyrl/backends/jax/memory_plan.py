"""Memory of a JAX device, and sizes of training calls that fit into it, measured on compiled programs.

`skyrl.backends.common.memory_plan` has the budget.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax

from skyrl.backends.common.memory_plan import GIB
from skyrl.tx.layers.devices import platform
from skyrl.utils.machine import host_memory

Mode = bool | Literal["selective"]
"""Activations of a layer to recompute in the backward pass; see `ModelConfig.gradient_checkpointing`."""

Checkpointing = Mode | Literal["auto"]

MODES: tuple[Mode, ...] = (False, "selective", True)
"""Modes, from the fastest to the one that takes the least memory."""

STACKS = (1, 4, 16)
"""Possible numbers of tiles in a call, ascending."""

TOGETHER_ON_CPU = 128
"""Maximum tokens of a call with several tiles on a CPU. A larger call takes as long as a call for each tile."""

COPIES_OF_A_STACK = 3
"""Copies of each adapter in a call with several tiles: in the stack, in the stack's gradients, and in its own
gradients."""

AT_ONCE = GIB // 4
"""Maximum bytes of attention scores that are computed at once, and of arrays derived from them."""


PREALLOCATED = 0.9
"""Fraction of a GPU's memory that JAX allocates at startup, and plans with."""


class Target(NamedTuple):
    """Kind of device that programs are planned for."""

    platform: str
    """As `jax.default_backend()`."""
    memory: int
    """Bytes of one device."""

    @classmethod
    def here(cls, devices: int) -> "Target":
        """Return the kind of this process's devices, if a program uses `devices` of them."""
        return cls(jax.default_backend(), memory_limit(devices))


def memory_limit(devices: int = 1) -> int:
    """Bytes of memory of one of `devices`: of an accelerator, or the device's share of the host's."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return host_memory() // devices


def choose_modes(
    asked: Checkpointing,
    lengths: list[int],
    typical: int,
    room: int,
    measure: Callable[[int, Mode], int],
    measures_longest: bool = True,
) -> tuple[dict[int, Mode], int]:
    """Choose the checkpointing mode for tiles of each length. Returns also the maximum bytes of a call.

    "auto" chooses the fastest mode with which a call fits into `room` bytes. Attention stores no scores, so memory is
    proportional to the length, except for temporary scores. The longest tile, whose compilation takes longest, is
    measured only if this estimate does not fit.

    Args:
        asked: Configured mode. Explicit values are kept even if they do not fit.
        lengths: Tile lengths, ascending.
        typical: One of the lengths, measured first.
        room: Available bytes.
        measure: (length, mode) -> bytes of a call.
        measures_longest: False: the estimate decides about the longest tile.
    """
    modes: dict[int, Mode] = {}
    most, left = 0, lengths
    for mode in MODES if asked == "auto" else (asked,):
        longest = left[-1]
        needed = measure(min(typical, longest), mode)
        if longest > typical:
            needed = needed * longest // typical + AT_ONCE
            needed = measure(longest, mode) if needed > room and measures_longest else needed
        last = asked != "auto" or mode is MODES[-1]
        fitting = [length for length in left if last or needed * length <= room * longest]
        modes |= dict.fromkeys(fitting, mode)
        most = max([most, *(needed * length // longest for length in fitting)])
        left = [length for length in left if length not in modes]
        if not left:
            break
    return modes, most


def tokens_together(tile_tokens: int) -> int:
    """Maximum tokens of a call with several tiles. `tile_tokens`: tokens of a full tile."""
    return min(tile_tokens, TOGETHER_ON_CPU) if platform() == "cpu" else tile_tokens


def choose_stacks(room: int, adapter: int, most: int = STACKS[-1]) -> tuple[int, ...]:
    """Choose the numbers of tiles per call that fit into `room` bytes, in addition to the memory of a single tile.

    Args:
        room: Available bytes.
        adapter: Bytes of the largest adapter's weights.
        most: Maximum number.
    """
    return tuple(stack for stack in STACKS if stack == 1 or (stack <= most and stack_bytes(stack, adapter) <= room))


def stack_bytes(stack: int, adapter: int) -> int:
    """Bytes that the adapters of a call take, in addition to the bytes for its tokens."""
    return COPIES_OF_A_STACK * stack * adapter if stack > 1 else 0
