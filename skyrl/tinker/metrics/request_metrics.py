"""Metrics of queued requests from acceptance to outcome: queue lengths, wait times, durations, tokens, failures."""

from collections.abc import Callable, Iterator
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary
from prometheus_client.core import Sample

from skyrl.tinker.identity.ids import kind_of
from skyrl.tinker.results import Failure, Lost, Outcome

BUCKETS = (0.05, 0.25, 1, 5, 15, 60, 300, 1800)
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
            buckets=BUCKETS,
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
