"""Metrics of the engine: its own statistics, restarts, snapshots and replays."""

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from skyrl.backends.statistics import STATISTICS, StatisticInfo, Statistics

PREFIX = "skyrl_engine_"
PROGRAMS = "_programs"
"""Suffix of the names of counters of compiled programs."""


class EngineFacts(Protocol):
    """Properties of an engine that metrics need (`skyrl.tinker.context.Engine`)."""

    @property
    def state(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def metrics(self) -> dict[str, int]: ...

    @property
    def statistics(self) -> Statistics: ...


class EngineMetrics:
    """Engine events counted by the API process, and statistics reported by the running engine.

    Args:
        registry: Registry of the metrics.
        engine: Returns the current engine.
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
        registry.register(self)  # pyright: ignore[reportArgumentType] (a class with `collect` is enough)
        ProcessCollector(namespace="skyrl_engine", pid=lambda: engine().pid or "none", registry=registry)

    def restarts_total(self) -> int:
        """Return the number of unexpected exits of engines so far."""
        return sum(int(sample.value) for metric in self.restarts.collect() for sample in metric.samples)

    def collect(self) -> Iterator[Metric]:
        """Yield the last statistics of the running engine. Counters restart at 0 with a new engine."""
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
