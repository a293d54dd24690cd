"""Labels of tenants: their display names. The number of labels is limited, to bound the time series."""

from skyrl.tinker.identity.display_names import LOCAL, DisplayNames

MOST_TENANTS = 50
"""Maximum number of tenants with their own label: the first ones that send requests. All later tenants share a label.
"""
OTHERS = "other"
"""Label of tenants without their own label."""


class TenantLabels:
    """Labels by tenant.

    Args:
        names: Names of the server's tenants.
    """

    def __init__(self, names: DisplayNames):
        self._names = names
        self._labelled: set[str] = set()

    def __call__(self, tenant: str) -> str:
        """Return the label of a tenant, which stays the same while the server runs."""
        if not self._names:
            return LOCAL
        if tenant not in self._labelled:
            if tenant not in self._names or len(self._labelled) == MOST_TENANTS:
                return OTHERS
            self._labelled.add(tenant)
        return self._names(tenant)
