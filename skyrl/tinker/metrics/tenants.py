"""Labels of tenants: the names of keys, which are not secret. Their number is limited, to bound the time series."""

from collections.abc import Iterable

MOST_TENANTS = 50
"""Maximum number of tenants with their own label: the first ones that send requests. All later tenants share a label.
"""
EVERYBODY, OTHERS = "local", "other"
"""Labels of all callers of a server without keys, and of tenants without their own label."""


class TenantLabels:
    """Labels by tenant.

    Args:
        names: Tenants of the server's keys. Empty for a server without keys, where each session is a tenant.
    """

    def __init__(self, names: Iterable[str]):
        self._names = frozenset(names)
        self._labelled: set[str] = set()

    def __call__(self, tenant: str) -> str:
        """Return the label of a tenant, which stays the same while the server runs."""
        if not self._names:
            return EVERYBODY
        if tenant not in self._labelled:
            if tenant not in self._names or len(self._labelled) == MOST_TENANTS:
                return OTHERS
            self._labelled.add(tenant)
        return tenant
