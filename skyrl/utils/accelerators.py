"""Detection of GPUs that torch can use. Does not load torch on machines without a GPU."""

import importlib.util
from pathlib import Path

DEVICES = ("nvidia[0-9]*", "kfd", "dxg")
"""Device files of NVIDIA's and AMD's drivers, and of either driver under WSL."""


def gpu_files(devices: Path = Path("/dev")) -> bool:
    """Return True if a GPU's device file exists."""
    return any(any(devices.glob(name)) for name in DEVICES)


def torch_sees_gpu(devices: Path = Path("/dev")) -> bool:
    """Return True if torch is installed and has a CUDA or ROCm device.

    Loads torch only if `devices` has a GPU's file.
    """
    if importlib.util.find_spec("torch") is None or not gpu_files(devices):
        return False
    import torch

    return torch.cuda.device_count() > 0
