"""Metrics of HTTP requests by route."""

from prometheus_client import CollectorRegistry, Counter, Histogram

BUCKETS = (0.01, 0.05, 0.25, 1, 5, 25, 60)
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
            buckets=BUCKETS,
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
