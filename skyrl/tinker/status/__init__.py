"""Status of a server for its operator, computed from existing state.

overview    the whole server: engine, requests, tenants, models, memory, disk; read this first
requests    each pending request, and the reason why it waits
models      each model that accepts requests

Tenants appear by the names of their keys, never by the keys. Texts and tokens do not appear.
"""
