"""Plan of memory, made at start: base weights, keys and values, one training call, models.

The numbers are those of the machine and of the compiled programs, not of the moment, so that a server that is started
again decides the same.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax

from skyrl.errors import RequestError
from skyrl.utils.machine import host_memory

Mode = bool | Literal["selective"]
"""Part of a layer to compute again in the backward pass; see `ModelConfig.gradient_checkpointing`."""

Checkpointing = Mode | Literal["auto"]

MODES: tuple[Mode, ...] = (False, "selective", True)
"""From the fastest to the smallest."""

KEPT_FREE = 0.1
"""Share of the memory that is not planned for."""

TRAINING_SHARE = 0.4
"""Share of what base weights and cache leave that a training call may take before more is computed again."""

GIB = 2**30

STACKS = (1, 4, 16)
"""Tiles in a call, ascending."""

COPIES_OF_A_STACK = 3
"""Of each adapter in a call of several: beside the others, its gradients beside theirs, and those by themselves."""

AT_ONCE = GIB // 4
"""Bytes of the scores that attention computes at once, and of what it makes of them, at most."""


class Plan(NamedTuple):
    """Bytes by purpose."""

    total: int
    base: int
    cache: int
    training: int
    """Of the largest call."""
    model: int
    """Of a model of the largest rank."""

    @property
    def left(self) -> int:
        """Bytes left for models and published versions."""
        return int(self.total * (1 - KEPT_FREE)) - self.base - self.cache - self.training

    @property
    def for_training(self) -> int:
        """Bytes that a training call should do with."""
        return int(self.left * TRAINING_SHARE)

    def models(self, device: float, host: float) -> tuple[int, int]:
        """Bytes on the device and in host memory for models that are open, of which the other half is versions'.

        Args:
            device: GiB as configured; 0 leaves it to the plan.
            host: Likewise. Where the device is the host, they share.

        Raises:
            RequestError: What is configured is not there.
        """
        shared = jax.default_backend() == "cpu"
        _check_room("adapter_memory_gib", device, self.left)
        on_device = int(device * GIB) or max(self.left // (4 if shared else 2), self.model)
        beside = self.left - on_device if shared else host_memory()
        _check_room("adapter_host_memory_gib", host, beside)
        return on_device, int(host * GIB) or (min(self.left // 4, beside // 2) if shared else beside // 4)

    def versions(self, gib: float, models: tuple[int, int]) -> int:
        """Bytes for published versions in memory.

        Args:
            gib: As configured; 0 leaves it to the plan, all that models leave.
            models: What `models` returned.

        Raises:
            RequestError: What is configured is not there.
        """
        device, host = models
        left = max(0, self.left - device - (host if jax.default_backend() == "cpu" else 0))
        _check_room("version_memory_gib", gib, left)
        return int(gib * GIB) or left

    def check(self, longest: int | None = None) -> None:
        """Raise `RequestError` unless one model fits beside the rest.

        Args:
            longest: Tokens of the longest sequence, once it is known what a training call takes.
        """
        if self.left >= self.model:
            return
        parts = f"base weights {_size(self.base)}, keys and values {_size(self.cache)}"
        remedies = "a smaller kv_cache_gib"
        if longest is not None:
            parts += f", a training call of {longest} tokens {_size(self.training)}"
            remedies += ", a smaller max_context_length or loss_chunk_size, gradient_checkpointing=true"
        raise RequestError(
            f"the model does not fit into memory: {parts}, one adapter with its moments {_size(self.model)}, together "
            f"more than {1 - KEPT_FREE:.0%} of {_size(self.total)} (memory_limit_gib); use {remedies}, a smaller "
            "max_lora_rank or base model, or a machine with more memory"
        )

    def __str__(self) -> str:
        return (
            f"memory {_size(self.total)}: base weights {_size(self.base)}, keys and values {_size(self.cache)}, "
            f"a training call {_size(self.training)} at most, for models {_size(self.left)}"
        )


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


def _check_room(field: str, gib: float, left: int) -> None:
    if gib * GIB > left:
        raise RequestError(
            f"{field}={gib:g} is more than the {_size(left)} that are left for it beside all else; use less, or 0 "
            "for a part of what is left"
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.1f} MiB"
