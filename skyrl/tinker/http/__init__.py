"""FastAPI application: routes, and their shared parts (errors, limits, connections)."""
