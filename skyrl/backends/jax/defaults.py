"""Options that are left to the platform: one function of the device, the base model and the memory that is left.

On CPU they are those of the measured lattice of `benchmarks/README.md`. On an accelerator they follow from memory and
have been chosen by arithmetic, not by measurement; `benchmarks/accelerator.py` is what measures them.
"""

from typing import Literal, NamedTuple

from skyrl.backends.common.memory_plan import GIB
from skyrl.backends.jax.config import JaxBackendConfig

Precision = Literal["default", "high", "highest"]

CPU_TILE, ACCELERATOR_TILE = 512, 4096
"""Tokens of a training micro-batch."""

CPU_CACHE = 2 * GIB
"""Bytes of the KV cache where the device is the host."""

CACHE_SHARE = 0.4
"""Part of what base weights leave of an accelerator's memory that is the KV cache's. Training, models and published
versions have the rest."""

FEWEST_ROWS, MOST_ROWS = 32, 256
"""Bounds of the rows of a decode batch. A step of fewer streams the same weights; the vocabulary's logits in float32
grow with them."""

ROW_TOKENS = 512
"""Tokens of the KV cache that there should be for each row."""


class Defaults(NamedTuple):
    """Values of the options that a configuration leaves at 0 or "auto", and of those that it gives."""

    matmul_precision: Precision
    tile_tokens: int
    """Tokens of a training micro-batch."""
    cache_bytes: int
    """Bytes of the KV cache, at most."""
    rows: int
    """Sequences decoded at once."""

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
) -> Defaults:
    """The options of a backend, on its platform.

    Args:
        config: What is given there stays.
        platform: As `jax.default_backend()`.
        exact: Whether base weights are float32. Products are then, too, although they take an accelerator several times
            as long; over a bfloat16 base those of float32 adapters round their inputs as `jax.lax.Precision.HIGH` does
            (TF32 on a GPU, three passes of bfloat16 on a TPU), by far less than the base's own activations are.
        left: Bytes of memory beside base weights and what is kept free.
        token_bytes: Keys and values of one token in all layers.
        room: Bytes of `gpu_memory_utilization` beside base weights. None: there is no such bound.
        state_bytes: State of one sequence in all layers that have such.
    """
    on_host = platform == "cpu"
    automatic: Precision = "highest" if on_host or exact else "high"
    share = CPU_CACHE if on_host else int(max(left, 0) * CACHE_SHARE)
    cache = int(config.kv_cache_gib * GIB) or share
    cache = cache if room is None else min(cache, room)
    rows, row_bytes = FEWEST_ROWS, ROW_TOKENS * token_bytes + 2 * state_bytes  # its prompt has a state too
    most = min(MOST_ROWS, config.sample_max_num_batched_tokens or MOST_ROWS)
    while not on_host and 2 * rows <= most and 2 * rows * row_bytes <= cache:
        rows *= 2
    return Defaults(
        matmul_precision=automatic if config.matmul_precision == "auto" else config.matmul_precision,
        tile_tokens=config.train_tile_tokens or (CPU_TILE if on_host else ACCELERATOR_TILE),
        cache_bytes=cache,
        rows=config.sample_max_num_sequences or rows,
    )
