"""Devices that are not here, for which XLA compiles programs: TPUs with libtpu, GPUs with JAX's CUDA plugin."""

import os
from math import prod
from typing import Any

import jax

from skyrl.backends.planning.devices import Devices
from skyrl.errors import RequestError

TOPOLOGIES = {
    "v5e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v6e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
}
"""Arrangements of TPUs that libtpu knows, ascending by size."""
NOT_ON_A_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment in which libtpu looks for no TPUs of its machine, and several processes may compile."""
HOPPER = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}
"""GPUs with compute capability 9.0, and their names in CUDA."""
HOPPER_CONFIG = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""
"""XLA's `GpuTargetConfigProto`. Source: NVIDIA H100 Tensor Core GPU Architecture; CUDA's table of capability 9.0."""

CUDA_PACKAGES = f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}"
"""Packages that compile for GPUs. CUDA's libraries, which they depend on, are needed only to run programs."""


def absent_devices(devices: Devices) -> list[Any]:
    """Return at least `devices.count` devices to compile for.

    Raises:
        RequestError: There is no compiler for them, or it is not installed.
    """
    kind = devices.kind
    if kind.name in HOPPER:
        config = HOPPER_CONFIG.format(
            bandwidth=int(kind.memory_gb_s * 1e9), memory=int(kind.memory_gib * 2**30), name=HOPPER[kind.name]
        )
        shape = f"{devices.nodes}x1x{min(devices.count, kind.per_node)}"
        return _topology("cuda", "", CUDA_PACKAGES, target_config=config, topology=shape)
    names = [name for name in TOPOLOGIES.get(kind.name, ()) if _size(name) >= devices.count]
    if not names:
        raise RequestError(
            f"--compile: there is no compiler for {devices.count} x {kind.name} here (known: "
            f"{', '.join(HOPPER)}, up to 256 x v5e or v6e, and 512 x v5p); leave out --compile"
        )
    for name, value in NOT_ON_A_TPU.items():
        os.environ.setdefault(name, value)
    return _topology("tpu", f"{kind.name}:{names[0]}", "libtpu")


def _topology(platform: str, name: str, packages: str, **options: Any) -> list[Any]:
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(name, platform, **options).devices)
    except Exception as error:  # of several types, if a package is missing
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise RequestError(
            f"--compile: {platform.upper()} devices need a compiler ({reason}); pip install --no-deps {packages} in a "
            "virtual environment of its own, or leave out --compile"
        ) from error


def _size(topology: str) -> int:
    return prod(map(int, topology.split("x")))
