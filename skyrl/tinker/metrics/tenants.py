"""Labels of tenants: names of keys, which are no secret, for as many as a time series database takes well."""

from collections.abc import Iterable

MOST_TENANTS = 50
"""Tenants with a label of their own, the first that come; the others share one."""
EVERYBODY, OTHERS = "local", "other"
"""Labels of all callers of a server without keys, and of those without a label of their own."""


class TenantLabels:
    """Labels by tenant.

    Args:
        names: Tenants of the server's keys; none: it has no keys, and each session is a tenant.
    """

    def __init__(self, names: Iterable[str]):
        self._names = frozenset(names)
        self._labelled: set[str] = set()

    def __call__(self, tenant: str) -> str:
        """The tenant's label, always the same while the server lives."""
        if not self._names:
            return EVERYBODY
        if tenant not in self._labelled:
            if tenant not in self._names or len(self._labelled) == MOST_TENANTS:
                return OTHERS
            self._labelled.add(tenant)
        return tenant
