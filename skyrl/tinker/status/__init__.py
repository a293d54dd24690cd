"""Status of a server for its operator. Nothing is counted for this, all of it is known elsewhere.

overview    the whole server: engine, requests, tenants, models, memory, disk; begin here
requests    each request that is owed an outcome, and what it waits for
models      each model that takes requests

Tenants are the names of their keys, never keys; texts and tokens are not here.
"""
