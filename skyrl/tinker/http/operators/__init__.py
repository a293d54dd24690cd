"""Routes of who operates a server, outside the API.

probes      whether it is alive and ready, and its version; no key is needed
metrics     what Prometheus reads
status      what it is doing
orders      a request is cancelled, a model unloaded
"""
