"""FastAPI: the application, its routes, and what all of them share (errors, limits, connections)."""
