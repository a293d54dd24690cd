"""The machine: devices, memory, versions, driver, and the rates that fractions of a peak refer to."""

import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers", "tinker")


def environment(process: dict[str, Any], *, tiny: bool) -> dict[str, object]:
    """Devices, memory in GiB, versions, and measured rates. Raises RuntimeError if there is no accelerator."""
    import jax

    from skyrl.backends.jax.backend import claim_device_memory

    claim_device_memory()
    devices = jax.devices()
    require_accelerator(tiny)
    stats = devices[0].memory_stats() or {}
    return {
        "device": f"{devices[0].platform} {devices[0].device_kind}",
        "devices": len(devices),
        "memory_gib": round(stats.get("bytes_limit", 0) / 2**30, 2) or None,
        "host": f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "driver": _driver(),
        "python": sys.version.split()[0],
        **{name: _version(name) for name in PACKAGES},
        **rates(256 if tiny else 8192, 2**20 if tiny else 2**30),
    }


def rates(size: int, copied: int) -> dict[str, object]:
    """Rates of products of random square matrices in TFLOP/s, and of a copy on the device in GB/s (read and written).

    Args:
        size: Rows of a matrix.
        copied: Bytes to copy.
    """
    import jax
    import jax.numpy as jnp

    found: dict[str, object] = {}
    for name, dtype, precision in (
        ("bf16", jnp.bfloat16, "default"),
        ("tf32", jnp.float32, "high"),
        ("float32", jnp.float32, "highest"),
    ):
        left, right = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in range(2))
        product = jax.jit(lambda a, b, precision=precision: jnp.matmul(a, b, precision=precision))
        found[f"{name}_tflops"] = round(2 * size**3 / per_call(product, left, right) / 1e12, 4)
    source = jax.random.normal(jax.random.key(0), (copied // 4,), jnp.float32)
    found["copy_gb_s"] = round(2 * copied / per_call(jax.jit(lambda x: x + 1), source) / 1e9, 2)
    return found


def per_call(function: Callable[..., Any], *arguments: Any, calls: int = 10, rounds: int = 5) -> float:
    """Seconds per call, of several calls dispatched together, median over rounds."""
    import jax

    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)  # replaces the previous result, so that few are in memory
        jax.block_until_ready(result)
        seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds)


def require_accelerator(tiny: bool) -> None:
    """Raise RuntimeError if JAX has no accelerator and the cases are not small ones."""
    import jax

    if not tiny and jax.default_backend() == "cpu":
        raise RuntimeError("JAX has found no accelerator (docs/accelerators.md); on a CPU use --tiny")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Driver of an NVIDIA GPU; None if there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return asked.stdout.strip() or asked.stderr.strip() or None
