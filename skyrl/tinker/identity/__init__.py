"""How things and callers are called: ids and `tinker://` paths, API keys and their tenants, signed tokens."""
