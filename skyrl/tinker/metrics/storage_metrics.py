"""Bytes on disk."""

import math
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge


class StorageMetrics:
    """Shows what was found on disk last."""

    def __init__(self, registry: CollectorRegistry):
        self.looked_at = -math.inf
        """Time of the last look, on the monotonic clock."""
        self.stored: dict[str, int] = {}
        self.free: int | None = None
        """Free bytes. Both this and `stored` are as of the last look."""
        self._stored = Gauge(
            "skyrl_stored_bytes",
            "Bytes of what is saved below checkpoints_base, its trash aside.",
            ["kind"],
            registry=registry,
        )
        self._free = Gauge("skyrl_disk_free_bytes", "Bytes left on the disk of checkpoints_base.", registry=registry)

    def found(self, stored: Mapping[str, int], free: int) -> None:
        """Bytes of each kind, and those that the disk has left."""
        self.stored, self.free = dict(stored), free
        for kind, size in stored.items():
            self._stored.labels(kind).set(size)
        self._free.set(free)
