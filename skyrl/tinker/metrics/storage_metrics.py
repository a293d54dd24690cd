"""Metrics of disk usage."""

import math
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge


class StorageMetrics:
    """Disk usage at the last measurement."""

    def __init__(self, registry: CollectorRegistry):
        self.looked_at = -math.inf
        """Time of the last measurement, on the monotonic clock."""
        self.stored: dict[str, int] = {}
        self.free: int | None = None
        """Free bytes of the disk at the last measurement, or None before any. `stored` has the used bytes by kind.
        """
        self._stored = Gauge(
            "skyrl_stored_bytes",
            "Bytes of what is saved below checkpoints_base, its trash aside.",
            ["kind"],
            registry=registry,
        )
        self._free = Gauge("skyrl_disk_free_bytes", "Bytes left on the disk of checkpoints_base.", registry=registry)

    def found(self, stored: Mapping[str, int], free: int) -> None:
        """Record a measurement: used bytes by kind, and free bytes of the disk."""
        self.stored, self.free = dict(stored), free
        for kind, size in stored.items():
            self._stored.labels(kind).set(size)
        self._free.set(free)
