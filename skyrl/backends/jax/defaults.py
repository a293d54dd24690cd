"""Options that depend on the platform, as a function of device, base model and remaining memory.

On CPU, defaults come from the measurements in `benchmarks/README.md`. On an accelerator, they are derived from memory
sizes and have not been measured; `benchmarks/accelerator.py` measures them.
"""

from typing import Literal, NamedTuple

from skyrl.backends.common.memory_plan import GIB, ROW_TOKENS, Device, default_cache, default_rows
from skyrl.backends.jax.config import JaxBackendConfig

Precision = Literal["default", "high", "highest"]

CPU_TILE, ACCELERATOR_TILE = 512, 4096
"""Tokens per training micro-batch."""


class Defaults(NamedTuple):
    """Resolved options: configured values, and defaults for options at 0 or "auto"."""

    matmul_precision: Precision
    tile_tokens: int
    """Tokens per training micro-batch."""
    cache_bytes: int
    """Maximum bytes of KV cache."""
    rows: int
    """Maximum sequences decoded at once."""
    cache_tokens: int
    """Maximum tokens in the KV cache."""

    def __str__(self) -> str:
        return (
            f"matmul precision {self.matmul_precision}, micro-batches of {self.tile_tokens} tokens, {self.rows} rows "
            f"decoded at once, KV cache of {self.cache_bytes / GIB:.2f} GiB at most"
        )


def resolved(
    config: JaxBackendConfig,
    platform: str,
    exact: bool,
    left: int,
    token_bytes: int,
    room: int | None = None,
    state_bytes: int = 0,
    devices: int = 1,
) -> Defaults:
    """Resolve the options of a backend on its platform.

    Args:
        config: Configuration. Explicit values are kept.
        platform: As `jax.default_backend()`.
        exact: True if base weights are float32. Matrix products are then float32, too, although this is several times
            slower on an accelerator. With a bfloat16 base, products of float32 adapters round their inputs as
            `jax.lax.Precision.HIGH` does (TF32 on a GPU, three passes of bfloat16 on a TPU). The base's own activations
            are rounded much more.
        left: Bytes of memory after base weights and the safety margin.
        token_bytes: Bytes of KV cache per token in all layers.
        room: Bytes that `gpu_memory_utilization` allows after base weights. None: no such limit.
        state_bytes: Bytes of recurrent state per sequence in all layers that have one.
        devices: Number of devices, which share the host's memory on a CPU.
    """
    on_host = platform == "cpu"
    automatic: Precision = "highest" if on_host or exact else "high"
    device: Device = "host" if on_host else "accelerator"
    cache = int(config.kv_cache_gib * GIB) or default_cache(device, left) // (devices if on_host else 1)
    cache = cache if room is None else min(cache, room)
    row_bytes = ROW_TOKENS * token_bytes + 2 * state_bytes  # the state of its prompt is stored too
    rows = default_rows(device, cache, row_bytes, config.sample_max_num_batched_tokens)
    return Defaults(
        matmul_precision=automatic if config.matmul_precision == "auto" else config.matmul_precision,
        tile_tokens=config.train_tile_tokens or (CPU_TILE if on_host else ACCELERATOR_TILE),
        cache_bytes=cache,
        rows=config.sample_max_num_sequences or rows,
        cache_tokens=cache // max(1, token_bytes),
    )
