"""Metrics of a server, in Prometheus' terms: what `GET /metrics` answers with.

    registry         all of a server's metrics; begin here
    http_metrics     HTTP requests, by route
    request_metrics  queued requests: depth and waits, tokens, failures
    engine_metrics   what the engine tells, its ends, snapshots and replays
    storage_metrics  bytes on disk
    tenants          labels of tenants, which are bounded and never keys

Labels come from small sets only: names of operations and routes, categories, at most `tenants.MOST_TENANTS` tenants.
"""
