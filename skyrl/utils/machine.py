"""Memory of this machine, or of the control group of this process, and the limit of open files."""

import contextlib
import importlib.util
import os
import resource
from pathlib import Path

CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with the limit and usage of a control group, for both versions of cgroups."""

MAX_FILES = 65536
"""Limit of open files, and so of connections, that a process requests from the system."""


def host_memory() -> int:
    """Return the memory of the machine or of its control group, in bytes."""
    limits = [_number(limit) for limit, _ in CGROUPS]
    return min([_machine(), *(limit for limit in limits if limit is not None)])


def available_memory() -> int:
    """Return the available memory in bytes: the machine's, or the unused part of the control group's limit if lower.

    On Linux, evictable caches of files count as available.
    """
    groups = [(_number(limit), _number(usage), _evictable(usage)) for limit, usage in CGROUPS]
    left = [limit - usage + evictable for limit, usage, evictable in groups if limit is not None and usage is not None]
    return max(0, min([_available(), *left]))


def resident_memory(pid: int) -> int | None:
    """Return the resident memory of a process in bytes; None if it is unknown or there is no such process."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def allow_many_files() -> None:
    """Raise this process's limit of open files (usually 1024), because each waiting sample needs a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MAX_FILES:
        with contextlib.suppress(ValueError, OSError):  # some systems allow less than the reported limit
            limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _available() -> int:
    """Return the available memory of the whole machine as estimated by Linux; the total on other systems."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return next(found, _machine())


def _evictable(usage: str) -> int:
    """Return the bytes of a control group's usage that are caches of files not used lately, as kubelet counts them."""
    stat = Path(usage).with_name("memory.stat")
    fields = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def _number(file: str) -> int | None:
    """Return the number in a file; None if the file contains no number (such as "max")."""
    path = Path(file)
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else None


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
