"""All metrics of a server, and their text."""

from collections.abc import Callable, Iterable

import prometheus_client
from prometheus_client.exposition import choose_encoder

from skyrl.tinker.metrics.engine_metrics import EngineFacts, EngineMetrics
from skyrl.tinker.metrics.http_metrics import HttpMetrics
from skyrl.tinker.metrics.request_metrics import RequestMetrics
from skyrl.tinker.metrics.storage_metrics import StorageMetrics
from skyrl.tinker.metrics.tenants import TenantLabels


class ServerMetrics:
    """Metrics of one API process; they begin at 0 with it, as Prometheus expects.

    Args:
        tenants: Tenants of the server's keys.
        engine: The engine as it is now.
    """

    def __init__(self, tenants: Iterable[str], engine: Callable[[], EngineFacts]):
        prometheus_client.disable_created_metrics()  # a line more for each series, which nobody reads
        self._registry = prometheus_client.CollectorRegistry()
        self.http = HttpMetrics(self._registry)
        self.requests = RequestMetrics(self._registry, TenantLabels(tenants))
        self.engine = EngineMetrics(self._registry, engine)
        self.storage = StorageMetrics(self._registry)
        prometheus_client.ProcessCollector(registry=self._registry)

    def text(self, accept: str) -> tuple[bytes, str]:
        """(all metrics, their media type): OpenMetrics for those who accept it, else Prometheus' text format.

        May be called in any thread.
        """
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type
