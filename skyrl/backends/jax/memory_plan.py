"""Memory of a JAX device, and what fits into it of training calls, from what compiled programs say.

What memory is for is in `skyrl.backends.common.memory_plan`.
"""

from collections.abc import Callable
from typing import Literal

import jax

from skyrl.backends.common.memory_plan import GIB
from skyrl.utils.machine import host_memory

Mode = bool | Literal["selective"]
"""Part of a layer to compute again in the backward pass; see `ModelConfig.gradient_checkpointing`."""

Checkpointing = Mode | Literal["auto"]

MODES: tuple[Mode, ...] = (False, "selective", True)
"""From the fastest to the smallest."""

STACKS = (1, 4, 16)
"""Tiles in a call, ascending."""

COPIES_OF_A_STACK = 3
"""Copies of each adapter in a call of several: in the stack, its gradients in theirs, and its gradients alone."""

AT_ONCE = GIB // 4
"""Bytes of the scores that attention computes at once, and of what it makes of them, at most."""


def memory_limit() -> int:
    """Bytes of memory where the base model is: of the accelerator, else of the host."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return host_memory()


def choose_modes(
    asked: Checkpointing, lengths: list[int], typical: int, room: int, measure: Callable[[int, Mode], int]
) -> tuple[dict[int, Mode], int]:
    """Choose what to compute again for tiles of each length, and count the bytes that a call takes at most.

    With "auto" it is the least that lets a call do with `room` bytes. Attention keeps no scores, so memory grows in
    proportion to the length, but for what it takes at once. The longest tile, which takes longest to compile, is
    measured only where that leaves doubt.

    Args:
        asked: An explicit value is kept, whatever it takes.
        lengths: Of tiles, ascending.
        typical: One of them, to measure first.
        room: Bytes.
        measure: (length, mode) -> bytes that a call takes.
    """
    modes: dict[int, Mode] = {}
    most, left = 0, lengths
    for mode in MODES if asked == "auto" else (asked,):
        longest = left[-1]
        needed = measure(min(typical, longest), mode)
        if longest > typical:
            needed = needed * longest // typical + AT_ONCE
            needed = needed if needed <= room else measure(longest, mode)
        last = asked != "auto" or mode is MODES[-1]
        fitting = [length for length in left if last or needed * length <= room * longest]
        modes |= dict.fromkeys(fitting, mode)
        most = max([most, *(needed * length // longest for length in fitting)])
        left = [length for length in left if length not in modes]
        if not left:
            break
    return modes, most


def choose_stacks(room: int, adapter: int) -> tuple[int, ...]:
    """Numbers of tiles that a call may have, so that it does with `room` bytes beside what a single tile takes.

    Args:
        room: Bytes.
        adapter: Bytes of the weights of the largest adapter.
    """
    return tuple(stack for stack in STACKS if stack == 1 or stack_bytes(stack, adapter) <= room)


def stack_bytes(stack: int, adapter: int) -> int:
    """Bytes that a call takes because of the adapters in it, beside what its tokens take."""
    return COPIES_OF_A_STACK * stack * adapter if stack > 1 else 0
