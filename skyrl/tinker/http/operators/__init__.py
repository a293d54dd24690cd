"""Routes for operators, outside the API.

probes      liveness, readiness and version; no key is needed
metrics     Prometheus metrics
status      current activity
usage       usage of all tenants, from the ledger
orders      cancellation of requests, unloading of models
"""
