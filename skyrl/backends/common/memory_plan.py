"""Memory budget computed at startup: base weights, KV cache, one training call, models.

It depends only on machine and model, not on current memory use, so a restarted server makes the same decisions. Each
backend determines the memory of a call itself.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeVar

from skyrl.errors import RequestError
from skyrl.utils.machine import host_memory

T = TypeVar("T")

Device = Literal["host", "accelerator"]

GIB = 2**30

KEPT_FREE = 0.1
"""Fraction of the memory that is not planned for."""

TRAINING_SHARE = 0.4
"""Fraction of `Plan.left` that a training call should not exceed. Calls that need more recompute activations."""

COPIES = 4
"""Maximum arrays of the size of a model's weights: weights, gradient sums and two moments."""

NEW_IN_A_STEP = 3
"""Arrays that optim_step creates in addition to existing ones: weights and two moments."""

CONTEXTS = (32_768, 16_384, 8_192)
"""Default limits of `max_context_length` in tokens: the longest with enough memory is chosen, or else the last."""

SEQUENCES_IN_CACHE = 2
"""Sequences of the longest length for which the cache must have room, for a default above the shortest."""

CACHE_SHARE = 0.4
"""Fraction of an accelerator's memory, after base weights, for the KV cache. The rest is for training, models and
published versions."""

BESIDE_CACHE = 2
"""Models for which a KV cache of the default size leaves room, if calls need more memory than expected."""

CPU_CACHE = 2 * GIB
"""Bytes of the KV cache on a CPU."""

FEWEST_ROWS = 32
MOST_ROWS: dict[Device, int] = {"host": 128, "accelerator": 256}
"""Bounds of the decode batch size. Smaller batches read the same weights in each step; larger batches need more memory
for float32 logits, and new requests wait longer for a step to end."""

ROW_TOKENS = 512
"""Desired tokens of KV cache per row."""


class SharedDevice(NamedTuple):
    """A device that sampling engines and training use alternately."""

    left: int
    """Bytes that engines leave free while they sample."""
    version: int
    """Bytes of one version, which this backend holds while it compares engines with itself."""
    models_leave: bool
    """True if models are in host memory while engines sample."""


class Plan(NamedTuple):
    """Bytes by purpose, on one device."""

    total: int
    base: int
    cache: int
    training: int
    """Bytes of the largest training call."""
    model: int
    """Bytes of a model of the largest rank."""
    device: Device = "host"
    """Kind of the device. On the host, models and their offloaded copies share one memory."""
    decoding: int = 0
    """Bytes of the largest decode call, in addition to the cache. It never runs together with a training call."""
    shared: SharedDevice | None = None
    """Memory in the sampling phase, if engines share the device; None if they do not."""

    @property
    def usable(self) -> int:
        """Bytes that are planned for."""
        return int(self.total * (1 - KEPT_FREE))

    @property
    def left(self) -> int:
        """Bytes left for models and published versions, in every phase in which they are on the device."""
        left = self.usable - self.base - self.cache - self.call
        return left if self.shared is None or self.shared.models_leave else min(left, self.beside_engines)

    @property
    def beside_engines(self) -> int:
        """Bytes left by base weights, cache and a decode call while engines sample. Versions are scored in this
        phase."""
        assert self.shared is not None
        return self.shared.left - self.base - self.cache - self.decoding

    @property
    def call(self) -> int:
        """Bytes of the largest call."""
        return max(self.training, self.decoding)

    @property
    def for_training(self) -> int:
        """Bytes that a training call should not exceed."""
        return int(self.left * TRAINING_SHARE)

    def models(self, device: float, host: float, host_total: int | None = None, held: int = 0) -> tuple[int, int]:
        """Bytes on the device and in host memory for open models. Published versions get the rest.

        Args:
            device: Configured GiB; 0: planned.
            host: Configured GiB; 0: planned. If the device is the host, both share its memory.
            host_total: Bytes of the host's memory; None: this machine's.
            held: As in `on_device`.

        Raises:
            RequestError: The configured memory is not available.
        """
        shared = self.device == "host"
        on_device = self.on_device(device, held)
        beside = self.left - on_device if shared else host_memory() if host_total is None else host_total
        _check_room("adapter_host_memory_gib", host, beside)
        return on_device, int(host * GIB) or (min(self.left // 4, beside // 2) if shared else beside // 4)

    def on_device(self, gib: float, held: int = 0) -> int:
        """First value of `models`. If no value is configured, it is at least `held` bytes, as far as these are left."""
        _check_room("adapter_memory_gib", gib, self.left)
        part = max(self.left // (4 if self.device == "host" else 2), self.model)
        return int(gib * GIB) or max(part, min(held, self.left))

    def versions(self, gib: float, models: tuple[int, int]) -> int:
        """Bytes for published versions in memory.

        Args:
            gib: Configured GiB; 0: all that models leave.
            models: Bytes for models on the device and in host memory.

        Raises:
            RequestError: The configured memory is not available.
        """
        device, host = models
        left = max(0, self.left - device - (host if self.device == "host" else 0))
        _check_room("version_memory_gib", gib, left)
        return int(gib * GIB) or left

    def versions_and_stacks(self, gib: float, models: tuple[int, int], adapter: int, stacked: int) -> tuple[int, int]:
        """Bytes for published versions in memory, and for stacks of the adapters that are sampled together.

        Args:
            gib: Configured GiB of versions; 0: planned.
            models: Bytes for models on the device and in host memory.
            adapter: Bytes of an adapter of the largest rank.
            stacked: Maximum number of adapters in stacks.

        Raises:
            RequestError: The configured memory is not available.
        """
        room, configured = self.versions(0, models), self.versions(gib, models)
        stacks = max(adapter, min(stacked * adapter, room - configured if gib else room // 2))
        return (configured if gib else max(0, room - stacks)), stacks

    def with_smaller_cache(self, least: int) -> "Plan":
        """The plan with a cache that leaves room for `BESIDE_CACHE` models, but has at least `least` bytes."""
        lacking = BESIDE_CACHE * self.model - self.left
        cache = max(least, self.cache - lacking) // 2**20 * 2**20
        return self._replace(cache=cache) if lacking > 0 and 0 < cache < self.cache else self

    def check(self, ways_out: str, call: str = "") -> None:
        """Raise `RequestError` unless one model fits in addition to the rest.

        Args:
            ways_out: Options to change, named in the error message.
            call: Description of the largest training call, once its size is known.
        """
        if self.left >= self.model:
            return
        parts = f"base weights {size_of(self.base)}, keys and values {size_of(self.cache)}"
        if call:
            parts += f", {call} {size_of(self.training)}"
        if self.decoding > self.training:
            parts += f", a decode call {size_of(self.decoding)} (in its place)"
        needed = self.base + self.cache + self.call + self.model
        raise RequestError(
            f"the model does not fit into memory: {parts}, one adapter with its moments {size_of(self.model)}, "
            f"together {size_of(needed)}, more than {1 - KEPT_FREE:.0%} of {size_of(self.total)} (memory_limit_gib); "
            f"use {ways_out}, a smaller max_lora_rank or base model, or a machine with more memory"
        )

    @property
    def fits_beside_engines(self) -> bool:
        """True if base weights, cache, a decode call and models fit on the device while engines sample."""
        return self.shared is None or self.beside_engines >= self._models_beside_engines

    @property
    def _models_beside_engines(self) -> int:
        assert self.shared is not None
        return self.shared.version if self.shared.models_leave else max(self.shared.version, self.model)

    def check_shared(self) -> None:
        """Raise `RequestError` unless `fits_beside_engines`."""
        if self.shared is None or self.fits_beside_engines:
            return
        models = self._models_beside_engines
        needed = self.shared.left - self.beside_engines + models
        raise RequestError(
            f"engines.colocated=True (trainer.placement.colocate_all): engines leave {size_of(self.shared.left)} of "
            f"the device while they sample, and {size_of(needed)} stay there: base weights {size_of(self.base)}, keys "
            f"and values {size_of(self.cache)}, a decode call {size_of(self.decoding)}, a version to compare or models "
            f"{size_of(models)}; use a smaller gpu_memory_utilization (generator.inference_engine, or "
            "engines.launch.arguments), kv_cache_gib or sample_max_num_sequences, offload_after_step=True, more "
            "workers that share weights (fsdp_size=-1), or give engines devices of their own"
        )

    def __str__(self) -> str:
        decoding = f"a decode call {size_of(self.decoding)} at most, " if self.decoding else ""
        where = "in host memory" if self.shared is not None and self.shared.models_leave else "where they are"
        engines = "" if self.shared is None else f"; engines leave {size_of(self.shared.left)}, with models {where}"
        return (
            f"memory {size_of(self.total)}: base weights {size_of(self.base)}, keys and values {size_of(self.cache)}, "
            f"a training call {size_of(self.training)} at most, {decoding}for models {size_of(self.left)}{engines}"
        )


def contexts(asked: int, config: Any, room: int) -> list[int]:
    """Return the possible maximum lengths of sequences in tokens, longest first.

    Args:
        asked: Configured length; 0: a default.
        config: Configuration of the model. If its rotary embeddings depend on this length (longrope), the default is
            the shortest one, so that embeddings do not depend on memory.
        room: Tokens for which the KV cache has room.
    """
    if asked:
        return [asked]
    rotations = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    room = 0 if "longrope" in str(rotations) else room
    made_for = getattr(config, "max_position_embeddings", None) or CONTEXTS[0]
    lengths = dict.fromkeys(min(made_for, length) for length in CONTEXTS)
    shortest = min(lengths)
    return [length for length in lengths if length == shortest or SEQUENCES_IN_CACHE * length <= room]


def first_fitting(plans: Iterable[T], fits: Callable[[T], bool]) -> T:
    """Return the first plan that fits, or the last one if none does. Later plans are not computed."""
    plans = iter(plans)
    plan = next(plans)
    while not fits(plan) and (following := next(plans, None)) is not None:
        plan = following
    return plan


def default_cache(device: Device, left: int) -> int:
    """Bytes of KV cache if none are configured. `left`: memory after base weights."""
    return CPU_CACHE if device == "host" else int(max(left, 0) * CACHE_SHARE)


def default_rows(device: Device, cache: int, row_bytes: int, most: int = 0) -> int:
    """Sequences to decode at once if no number is configured.

    Args:
        device: Kind of the device.
        cache: Bytes of KV cache.
        row_bytes: Desired bytes of cache per sequence.
        most: Maximum; 0: none of its own.
    """
    rows, most = FEWEST_ROWS, min(most or MOST_ROWS[device], MOST_ROWS[device])
    while 2 * rows <= most and 2 * rows * row_bytes <= cache:
        rows *= 2
    return rows


def size_of(nbytes: int) -> str:
    """A number of bytes in human-readable form."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.1f} MiB"


def _check_room(field: str, gib: float, left: int) -> None:
    if gib * GIB > left:
        raise RequestError(
            f"{field}={gib:g} is more than the {size_of(left)} that are left for it beside all else; use less, or 0 "
            "for a part of what is left"
        )
