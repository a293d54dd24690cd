"""Sizes and speeds of devices: presets from public data sheets, or a file.

Memory is the data sheet's, less the part that the driver or runtime keeps. Peaks are dense bfloat16. Bandwidths of
links and networks are those of one direction.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skyrl.errors import RequestError
from skyrl.utils.expected import expected
from skyrl.utils.machine import host_memory
from skyrl.utils.spelling import did_you_mean

FILES = (".json", ".yaml", ".yml")


class DeviceKind(BaseModel):
    """One kind of device, in nodes of `per_node`. Speeds of 0 are unknown, and give no rate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    platform: str = Field(default="gpu", pattern="^(cpu|gpu|tpu)$")
    memory_gib: float = Field(gt=0)
    tflops: float = Field(default=0.0, ge=0)
    """Peak of bfloat16 products, in 1e12 operations per second."""
    memory_gb_s: float = Field(default=0.0, ge=0)
    """Bandwidth of the device's memory, in 1e9 bytes per second."""
    link_gb_s: float = Field(default=0.0, ge=0)
    """Bandwidth of a device's links to other devices, in 1e9 bytes per second."""
    network_gb_s: float = Field(default=0.0, ge=0)
    """Bandwidth of a node's network, in 1e9 bytes per second."""
    per_node: int = Field(default=8, ge=1)
    """Devices of a node (host)."""
    linked: int = Field(default=0, ge=0)
    """Devices that links connect, such as a TPU pod. 0: those of a node."""
    host_gib: float = Field(default=0.0, ge=0)
    """Memory of a node's host. 0: unknown."""
    source: str = ""
    """Public data sheets."""


NVIDIA = "https://www.nvidia.com/en-us/data-center"
GOOGLE = "https://docs.cloud.google.com/tpu/docs"
FIELDS = (
    *("name", "platform", "memory_gib", "tflops", "memory_gb_s", "link_gb_s", "network_gb_s"),
    *("per_node", "linked", "host_gib", "source"),
)
ROWS = (  # links at half of their bidirectional bandwidth; nodes with GPUs are those of a DGX, with a port for each GPU
    ("a100", "gpu", 79, 312, 2039, 300, 200, 8, 8, 2000, f"{NVIDIA}/a100, {NVIDIA}/dgx-a100"),
    ("h100", "gpu", 79, 989, 3350, 450, 400, 8, 8, 2000, f"{NVIDIA}/h100, {NVIDIA}/dgx-h100"),
    ("h200", "gpu", 139, 989, 4800, 450, 400, 8, 8, 2000, f"{NVIDIA}/h200, {NVIDIA}/dgx-h200"),
    ("b200", "gpu", 178, 2250, 8000, 900, 400, 8, 8, 2000, f"{NVIDIA}/dgx-b200"),
    ("v5e", "tpu", 15.75, 197, 819, 200, 25, 8, 256, 512, f"{GOOGLE}/v5e"),
    ("v5p", "tpu", 95, 459, 2765, 600, 25, 4, 8960, 448, f"{GOOGLE}/v5p-training"),
    ("v6e", "tpu", 31.25, 918, 1638, 400, 100, 8, 256, 1536, f"{GOOGLE}/v6e"),
)
PRESETS = {row[0]: DeviceKind.model_validate(dict(zip(FIELDS, row, strict=True))) for row in ROWS}


@dataclass(frozen=True)
class Devices:
    """Several devices of one kind."""

    kind: DeviceKind
    count: int

    @property
    def memory(self) -> int:
        """Bytes of one device. CPU devices share their host's memory."""
        memory = int(self.kind.memory_gib * 2**30)
        return memory // self.count if self.kind.platform == "cpu" else memory

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.count // self.kind.per_node)

    @property
    def host(self) -> int:
        """Bytes of a node's host; 0: unknown."""
        return int(self.kind.host_gib * 2**30)


def devices_of(text: str) -> Devices:
    """Return the devices of `NAME[:COUNT]`, such as h100:8.

    NAME is a preset, "cpu" for this machine, or a JSON or YAML file of a `DeviceKind`.

    Raises:
        RequestError: There is no such preset or file, or the count is no positive number.
    """
    name, _, count = text.partition(":")
    if not (count or "1").isdigit() or int(count or 1) < 1:
        raise RequestError(f"--devices={text}: {count!r} is no number of devices; write one from 1, as in {name}:8")
    return Devices(_kind(name), int(count or 1))


def _kind(name: str) -> DeviceKind:
    if name in PRESETS:
        return PRESETS[name]
    if name == "cpu":
        return DeviceKind(name="cpu", platform="cpu", memory_gib=host_memory() / 2**30)
    path = Path(name).expanduser()
    if path.suffix not in FILES:
        raise RequestError(
            f"--devices={name}: there is no such preset (known: {', '.join(PRESETS)}, cpu); name one, or a file that "
            f"ends in .json or .yaml{did_you_mean(name, PRESETS)}"
        )
    try:
        return DeviceKind.model_validate({"name": path.stem} | _read(path))
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            hint = did_you_mean(field, DeviceKind.model_fields)
            raise RequestError(f"--devices={name}: {field}: there is no such field{hint}") from None
        value = "missing; give" if problem["type"] == "missing" else f"{problem['input']!r}:"
        raise RequestError(f"--devices={name}: {field} is {value} {expected([problem])}") from None


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_text()
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise RequestError(
            f"--devices={path}: cannot be read ({reason}); name a file with the fields of a device"
        ) from None
    if not isinstance(found, dict):
        raise RequestError(f"--devices={path}: no mapping; write fields such as memory_gib: 80")
    return found
