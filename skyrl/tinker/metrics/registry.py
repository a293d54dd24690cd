"""All metrics of a server, and their text format."""

from collections.abc import Callable, Iterator, Sequence

import prometheus_client
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from skyrl.tinker.identity.display_names import DisplayNames
from skyrl.tinker.metrics.engine_metrics import EngineFacts, EngineMetrics
from skyrl.tinker.metrics.http_metrics import HttpMetrics
from skyrl.tinker.metrics.request_metrics import RequestMetrics
from skyrl.tinker.metrics.storage_metrics import StorageMetrics
from skyrl.tinker.metrics.tenants import TenantLabels
from skyrl.utils.slow_calls import SERVICES, SlowCall


class ServerMetrics:
    """Metrics of one API process. They start at 0 with the process, as Prometheus expects.

    Args:
        names: Names of the server's tenants.
        engine: Returns the current engine.
        slow_calls: Returns the calls to services that take longer than expected.
    """

    def __init__(
        self,
        names: DisplayNames,
        engine: Callable[[], EngineFacts],
        slow_calls: Callable[[], Sequence[SlowCall]] = tuple,
    ):
        prometheus_client.disable_created_metrics()  # an unused extra line per series
        self._registry = prometheus_client.CollectorRegistry()
        self.http = HttpMetrics(self._registry)
        self.requests = RequestMetrics(self._registry, TenantLabels(names))
        self.engine = EngineMetrics(self._registry, engine)
        self.storage = StorageMetrics(self._registry)
        self._slow_calls = slow_calls
        self._registry.register(self)  # pyright: ignore[reportArgumentType] (a class with `collect` is enough)
        prometheus_client.ProcessCollector(registry=self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metric of slow calls, measured now."""
        longest = GaugeMetricFamily(
            "skyrl_slow_call_seconds",
            "Seconds of the longest call in progress that takes longer than expected; 0 if there is none.",
            labels=["service"],
        )
        calls = self._slow_calls()
        for service in SERVICES:
            longest.add_metric([service], max((call.seconds for call in calls if call.service == service), default=0.0))
        yield longest

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return (text of all metrics, media type). The format is OpenMetrics if `accept` lists it, or Prometheus text.

        May be called in any thread.
        """
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type
