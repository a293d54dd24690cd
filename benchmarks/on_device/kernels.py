"""The most expensive kernels of a training step and of decoding, as measured by the profiler of JAX."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from .loaded import Loaded
from .throughput import LENGTH, PROMPT

LONGEST = 10
"""Number of kernels listed."""


def profile(process: dict[str, Any], *, shape: str) -> dict[str, object]:
    """The ten longest kernels of a training step and of 64 decode steps of 32 rows, with their share of all kernels."""
    loaded = Loaded.of(process, shape)
    models = loaded.models(1)
    length, rows, new = (64, 4, 8) if loaded.tiny else (LENGTH, 32, 64)

    def step() -> None:
        loaded.passes(models, [[loaded.datum(length) for _ in range(4)]])

    def generate() -> None:
        (version,) = loaded.versions(models)
        loaded.finish([loaded.sampling(version, loaded.prompt(PROMPT), new, rows)])

    found: dict[str, object] = {}
    for name, job in (("train", step), ("decode", generate)):
        job()  # compiles
        found |= {f"{name}_{key}": value for key, value in _traced(job).items()}
    if not all(found[f"{name}_kernels_ms"] for name in ("train", "decode")):
        found["problems"] = ["the profiler saw no kernels"]
    return found


def _traced(job: Any) -> dict[str, object]:
    import jax

    with tempfile.TemporaryDirectory(prefix="skyrl-profile-") as folder:
        with jax.profiler.trace(folder):
            job()
        (file,) = Path(folder).rglob("*.xplane.pb")
        nanoseconds = kernel_times(jax.profiler.ProfileData.from_file(str(file)))
    total = sum(nanoseconds.values())
    longest = [
        f"{name[:80]}: {1e-6 * duration:.2f} ms, {duration / total:.1%}"
        for name, duration in nanoseconds.most_common(LONGEST)
        if total
    ]
    return {"kernels_ms": 1e-6 * total, "kernels": longest}


def kernel_times(data: Any) -> Counter[str]:
    """Nanoseconds by kernel: from a GPU's streams, a TPU's operations, or XLA's threads on a CPU."""
    planes = list(data.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    times: Counter[str] = Counter()
    for plane in devices or [plane for plane in planes if plane.name.startswith("/host:CPU")]:
        lines = list(plane.lines)
        streams = [line for line in lines if line.name.startswith("Stream")]
        operations = [line for line in lines if line.name == "XLA Ops"]
        threads = [line for line in lines if "XLA" in line.name or "Eigen" in line.name] if not devices else []
        for line in streams or operations or threads:
            for event in line.events:
                if devices or "::" not in event.name:  # on a CPU, runtime frames enclose those of kernels
                    times[event.name] += event.duration_ns
    return times
