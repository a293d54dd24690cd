"""Checks of Python, packages, devices, process limits and the clock."""

import resource
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from skyrl.admin.doctor.finding import Finding, ok, problem, warning
from skyrl.backends.registry import TORCH_NAMES, default_backend
from skyrl.tinker.config import EngineConfig
from skyrl.utils.machine import gpu_files

DEVICES_S = 120.0
"""Timeout of the detection of devices, in seconds."""
JAX_DEVICES = "import jax; found = jax.devices(); print(len(found), found[0].platform, found[0].device_kind)"
TORCH_DEVICES = (
    "import torch; n = torch.cuda.device_count(); print(n or 1, *(('cuda', torch.cuda.get_device_name(0)) if n else "
    "('cpu', 'cpu')))"
)
FEW_FILES, MANY_FILES = 1024, 8192
"""Limits of open files: below the first, a server can have few connections; from the second on, many."""
FEW_PROCESSES = 512
"""Minimum limit of processes and threads for starting a server. Numerical libraries start many threads."""
BUILT = 1_767_225_600
"""Unix time in seconds before any release of this version: the start of 2026, UTC."""


def backend_of(config: EngineConfig) -> str:
    """Return the name of the backend for these options."""
    return config.backend or default_backend()


def python(config: EngineConfig) -> Finding:
    """Check the version of Python."""
    version, needed = ".".join(map(str, sys.version_info[:3])), metadata.metadata("skyrl")["Requires-Python"]
    if version not in SpecifierSet(needed or ""):
        return problem(
            f"Python {version} at {sys.executable}, and skyrl needs {needed}", "install skyrl in a newer one"
        )
    return ok(f"{version} ({needed})")


def packages(config: EngineConfig) -> Finding:
    """Check versions of packages against the lower bounds in `pyproject.toml`."""
    extras = {"train"} if backend_of(config) in TORCH_NAMES else set[str]()
    extras |= {"postgres"} if config.database_url.startswith("postgresql") else set()
    wrong, count = [], 0
    for needed in map(Requirement, metadata.requires("skyrl") or []):
        if needed.marker and not any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        count += 1
        try:
            version = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{needed.name} is missing ({needed.specifier} is needed)")
            continue
        if not needed.specifier.contains(version, prereleases=True):
            wrong.append(f"{needed.name} {version} ({needed.specifier} is needed)")
    if wrong:
        name = f"skyrl[{','.join(sorted(extras))}]" if extras else "skyrl"
        return problem("; ".join(wrong), f"{sys.executable} -m pip install --upgrade '{name}'")
    return ok(f"{count} packages are there, none older than needed")


def devices(config: EngineConfig) -> Finding | None:
    """Check the devices that the backend finds, in a separate process, because a driver may hang or crash it."""
    backend = backend_of(config)
    code = JAX_DEVICES if backend == "jax" else TORCH_DEVICES
    if ":" in backend:  # a custom backend
        return None
    library = "JAX" if backend == "jax" else "torch"
    try:
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEVICES_S)
    except subprocess.TimeoutExpired:
        return problem(
            f"{library} has not found its devices within {DEVICES_S:g} s",
            "see whether the driver answers (nvidia-smi); another process may hold the device",
        )
    if run.returncode != 0:
        last = (run.stderr.strip() or f"exit status {run.returncode}").splitlines()[-1]
        return problem(f"{library} finds no device: {last}", "check JAX_PLATFORMS, the driver and the packages")
    count, platform, kind = run.stdout.strip().split(maxsplit=2)
    seen = f"{library}: {count} x {kind} ({platform})"
    if platform == "cpu" and gpu_files():
        extra = "gpu" if backend == "jax" else "train"
        return warning(
            f"{seen}, though this machine has a GPU",
            f"pip install 'skyrl[{extra}]', and check the driver (nvidia-smi) and JAX_PLATFORMS",
        )
    return ok(seen)


def open_files(config: EngineConfig) -> Finding:
    """Check the hard limit of open files, which limits connections.

    A server raises its soft limit to the hard limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = "raise it: ulimit -Hn 65536, LimitNOFILE= of a systemd unit, --ulimit nofile of a container"
    if hard == resource.RLIM_INFINITY or hard >= MANY_FILES:
        return ok("no limit" if hard == resource.RLIM_INFINITY else f"{hard} at most")
    seen = f"a process may open {hard} files, and each waiting client takes one"
    return problem(seen, remedy) if hard < FEW_FILES else warning(seen, remedy)


def processes(config: EngineConfig) -> Finding:
    """Check the limit of processes and threads of this user."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit == resource.RLIM_INFINITY or limit >= FEW_PROCESSES:
        return ok("no limit" if limit == resource.RLIM_INFINITY else f"{limit} at most")
    return problem(
        f"this user may have {limit} processes and threads; a server may need {FEW_PROCESSES}",
        "raise it: ulimit -u, TasksMax= of a systemd unit, --pids-limit of a container",
    )


def clock(config: EngineConfig) -> Finding:
    """Check the clock against times of existing files. Tokens, links and expiration depend on it."""
    now, base = time.time(), config.checkpoints_folder
    written = [path.stat().st_mtime for path in _files(base)]
    ahead = max([now, *written]) - now
    remedy = "set it, and keep it right by NTP (timedatectl set-ntp true)"
    if now < BUILT:
        return problem(f"the clock says {time.ctime(now)}, which is before this version was made", remedy)
    if ahead > 60:
        return warning(f"files below {base} are from {ahead:.0f} s later than now, so the clock went back", remedy)
    return ok(time.strftime("%Y-%m-%d %H:%M:%S %Z"))


def _files(base: Path) -> list[Path]:
    return [path for path in base.glob("*") if path.exists()] if base.is_dir() else []


CHECKS = (python, packages, devices, open_files, processes, clock)
