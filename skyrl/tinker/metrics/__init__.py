"""Prometheus metrics of a server, served by `GET /metrics`.

    registry         all metrics of a server; read this first
    http_metrics     HTTP requests by route
    request_metrics  queued requests: queue length, wait times, tokens, failures
    engine_metrics   statistics of the engine, restarts, snapshots and replays
    storage_metrics  bytes on disk
    tenants          labels of tenants: names of keys, limited in number

Labels have few values: names of operations and routes, categories, and at most `tenants.MOST_TENANTS` tenants.
"""
