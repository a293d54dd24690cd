"""Prometheus metrics of a server, served by `GET /metrics`. `ServerMetrics` has all of them.

Labels have few values: names of operations and routes, categories, and at most `MOST_TENANTS` tenants.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, Summary
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, Sample
from prometheus_client.exposition import choose_encoder

from skyrl.backends.statistics import STATISTICS, StatisticInfo, Statistics
from skyrl.tinker.identity.callers import LOCAL, DisplayNames
from skyrl.tinker.identity.ids import kind_of
from skyrl.tinker.results import Failure, Lost, Outcome
from skyrl.utils.slow_calls import SERVICES, SlowCall

MOST_TENANTS = 50
"""Maximum number of tenants with their own label: the first ones that send requests. All later tenants share a label.
"""
OTHERS = "other"
"""Label of tenants without their own label."""


class TenantLabels:
    """Labels by tenant.

    Args:
        names: Names of the server's tenants.
    """

    def __init__(self, names: DisplayNames):
        self._names = names
        self._labelled: set[str] = set()

    def __call__(self, tenant: str) -> str:
        """Return the label of a tenant, which stays the same while the server runs."""
        if not self._names:
            return LOCAL
        if tenant not in self._labelled:
            if tenant not in self._names or len(self._labelled) == MOST_TENANTS:
                return OTHERS
            self._labelled.add(tenant)
        return self._names(tenant)


HTTP_BUCKETS = (0.01, 0.05, 0.25, 1, 5, 25, 60)
"""Upper bounds of the histogram's buckets in seconds. The largest bound is above the longest poll."""
METHODS = frozenset({"GET", "POST", "PUT", "DELETE"})
"""Methods with a label of their own. All others share the label "other"."""


class HttpMetrics:
    """Counts and times responses. `route` is the path template, never the path."""

    def __init__(self, registry: CollectorRegistry):
        self._seconds = Histogram(
            "skyrl_http_request_seconds",
            "Seconds until a request was answered as a whole; long polls (retrieve_future) wait by design.",
            ["method", "route"],
            buckets=HTTP_BUCKETS,
            registry=registry,
        )
        self._responses = Counter(
            "skyrl_http_responses", "Answers by status.", ["method", "route", "status"], registry=registry
        )

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Record a response."""
        method = method if method in METHODS else "other"
        self._seconds.labels(method, route).observe(seconds)
        self._responses.labels(method, route, str(status)).inc()


REQUEST_BUCKETS = (0.05, 0.25, 1, 5, 15, 60, 300, 1800)
"""Histogram buckets in seconds."""

TokenKind = Literal["prompt", "sampled", "trained", "scored"]
"""prompt and sampled: tokens of samples. trained: tokens of passes with gradients. scored: tokens of other passes."""


class RequestMetrics:
    """Counts requests by state. A request is waiting until the engine starts it, then running until it ends.

    Args:
        registry: Registry of the metrics.
        label: Returns the label of a tenant; see `TenantLabels`.
    """

    def __init__(self, registry: CollectorRegistry, label: Callable[[str], str]):
        self._label = label
        self._waiting = Gauge(
            "skyrl_requests_waiting",
            "Requests that were accepted and that the engine has not begun.",
            ["tenant"],
            registry=registry,
        )
        self._running = Gauge(
            "skyrl_requests_running",
            "Requests that the engine has begun and that have no outcome yet.",
            ["tenant"],
            registry=registry,
        )
        self._wait = Summary(
            "skyrl_request_wait_seconds",
            "Seconds until the engine began with a request: from its acceptance, or from the end of an engine.",
            ["tenant"],
            registry=registry,
        )
        self._seconds = Histogram(
            "skyrl_request_seconds",
            "Seconds from the acceptance of a request to its outcome.",
            ["operation"],
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self._failed = Counter(
            "skyrl_requests_failed",
            "Requests whose outcome was an error; by category: user, server, unknown, or lost (sent again by clients).",
            ["operation", "category"],
            registry=registry,
        )
        self._tokens = Counter(
            "skyrl_tokens",
            "Tokens of requests that were done: prompt and sampled (of samples), trained (of passes with gradients), "
            "scored (of passes without).",
            ["tenant", "kind"],
            registry=registry,
        )

    def added(self, tenant: str) -> None:
        """Record that a request was accepted."""
        self._waiting.labels(self._label(tenant)).inc()

    def began(self, tenant: str, waited_s: float) -> None:
        """Record that the engine started a request after `waited_s` seconds."""
        label = self._label(tenant)
        self._waiting.labels(label).dec()
        self._running.labels(label).inc()
        self._wait.labels(label).observe(waited_s)

    def interrupted(self, tenant: str) -> None:
        """Record that a running request is waiting again."""
        label = self._label(tenant)
        self._running.labels(label).dec()
        self._waiting.labels(label).inc()

    def left(self, tenant: str, ran: bool) -> None:
        """Remove a request from the gauges. `ran` is True if it was running."""
        (self._running if ran else self._waiting).labels(self._label(tenant)).dec()

    def ended(self, request_id: str, outcome: Outcome, seconds: float) -> None:
        """Record the outcome of a request."""
        operation = kind_of(request_id)
        self._seconds.labels(operation).observe(seconds)
        if isinstance(outcome, Failure | Lost):
            category = outcome.category if isinstance(outcome, Failure) else "lost"
            self._failed.labels(operation, category).inc()

    def tokens(self, tenant: str, kind: TokenKind, count: int) -> None:
        """Record `count` tokens of a finished request."""
        self._tokens.labels(self._label(tenant), kind).inc(count)

    def tenant_totals(self) -> dict[str, dict[str, int]]:
        """Return the number of waiting requests, of running requests and of tokens by kind so far, for each tenant."""
        totals: dict[str, dict[str, int]] = {}
        families = {"waiting": self._waiting, "running": self._running, "": self._tokens}
        for name, family in families.items():
            for sample in _values(family):
                of_tenant = totals.setdefault(sample.labels["tenant"], {})
                of_tenant[name or sample.labels["kind"]] = int(sample.value)
        return totals

    def ended_totals(self) -> dict[str, int]:
        """Return the number of ended requests so far, by operation."""
        counts = (sample for sample in _values(self._seconds) if sample.name.endswith("_count"))
        return {sample.labels["operation"]: int(sample.value) for sample in counts}

    def failed_total(self) -> int:
        """Return the number of failed requests so far."""
        return sum(int(sample.value) for sample in _values(self._failed))


def _values(family: Gauge | Counter | Histogram) -> Iterator[Sample]:
    return (sample for metric in family.collect() for sample in metric.samples)


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
