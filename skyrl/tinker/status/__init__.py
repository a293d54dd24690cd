"""Status of a server for its operator, computed from existing state.

overview    the whole server: engine, requests, tenants, models, memory, disk; read this first
requests    each pending request, and the reason why it waits
models      each model that accepts requests

Tenants appear by their display names, never by their keys. Texts and tokens do not appear.
"""
