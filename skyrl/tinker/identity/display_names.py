"""Names of tenants as operators see them: in status, usage, metrics and logs. They do not affect who owns what."""

from collections.abc import Mapping

LOCAL = "local"
"""Name of everybody on a server without keys, where each session is a tenant."""


class DisplayNames:
    """Display names of a server's tenants.

    Args:
        names: Display name of each tenant that has a key. Empty for a server without keys.
    """

    def __init__(self, names: Mapping[str, str]):
        self._names = dict(names)
        self._tenants = {name: tenant for tenant, name in names.items()}

    def __bool__(self) -> bool:
        """Return True if the server has keys."""
        return bool(self._names)

    def __contains__(self, tenant: str) -> bool:
        """Return True if the tenant has a key."""
        return tenant in self._names

    def __call__(self, tenant: str) -> str:
        """Return the display name of a tenant. A tenant whose key was removed is shown by its id."""
        return self._names.get(tenant, tenant) if self._names else LOCAL

    def tenant(self, name: str) -> str:
        """Return the tenant with this display name or id."""
        return self._tenants.get(name, name)
