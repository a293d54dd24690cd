"""Identifiers and callers: ids and `tinker://` paths, API keys and their tenants, signed tokens."""
