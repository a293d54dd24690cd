"""The engine: what it tells of itself, how often it ended, and what is done so that nothing is lost by that."""

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from skyrl.backends.statistics import STATISTICS, StatisticInfo, Statistics

PREFIX = "skyrl_engine_"
PROGRAMS = "_programs"
"""End of the names of counts of compiled programs."""


class EngineFacts(Protocol):
    """Facts about an engine that metrics show (`skyrl.tinker.context.Engine`)."""

    @property
    def state(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def metrics(self) -> dict[str, int]: ...

    @property
    def statistics(self) -> Statistics: ...


class EngineMetrics:
    """Counts what the API process sees of engines, and shows what the one that runs tells.

    Args:
        registry: Where its metrics are.
        engine: The engine as it is now.
    """

    def __init__(self, registry: CollectorRegistry, engine: Callable[[], EngineFacts]):
        self._engine = engine
        self.restarts = Counter(
            "skyrl_engine_restarts", "Engines that ended by themselves, and in whose place another is started.",
            registry=registry,
        )  # fmt: skip
        self.snapshots = Counter("skyrl_snapshots", "Snapshots of models that were written.", registry=registry)
        self.snapshot_bytes = Counter("skyrl_snapshot_bytes", "Bytes of those snapshots.", registry=registry)
        self.revivals = Counter(
            "skyrl_models_revived", "Models that were brought back to an engine from disk.", registry=registry
        )
        self.replays = Counter(
            "skyrl_requests_replayed", "Requests that were done again to bring models back.", registry=registry
        )
        registry.register(self)  # pyright: ignore[reportArgumentType] (it is told by its `collect`)
        ProcessCollector(namespace="skyrl_engine", pid=lambda: engine().pid or "none", registry=registry)

    def restarts_total(self) -> int:
        """Engines so far that ended by themselves."""
        return sum(int(sample.value) for metric in self.restarts.collect() for sample in metric.samples)

    def collect(self) -> Iterator[Metric]:
        """Yield the last report of the running engine. Counters of a new engine begin at 0 again."""
        engine = self._engine()
        ready = engine.state == "ready"
        yield GaugeMetricFamily(f"{PREFIX}ready", "1 while the engine is ready, else 0.", value=float(ready))
        if not ready:
            return
        compiled = CounterMetricFamily(f"{PREFIX}compiled_programs", "Programs that were compiled.", labels=["purpose"])
        for name, count in engine.metrics.items():
            compiled.add_metric([name.removesuffix(PROGRAMS)], count)
        yield compiled
        for name, value in engine.statistics.items():
            kind, text = STATISTICS.get(name, StatisticInfo("gauge", "Told by the backend."))
            family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            yield family(PREFIX + name, text, value=value)
