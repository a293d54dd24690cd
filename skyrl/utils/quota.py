"""Quotas on concurrent use. Other tenants cannot starve a tenant, even together.

A tenant may use half of the amount that the other tenants leave free. A single tenant may thus use half of the limit.
If n tenants use all they can, each ends up with 1/(n + 1) of the limit. A tenant without any use is admitted with one
request of any size. The total stays below the limit plus one request per tenant.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class Busy(Exception):
    """The quota is exceeded; the client should retry in a moment."""


class Quota:
    """Counter of current use. Limits are passed with each check.

    Args:
        what: Name of the counted things, with braces for the number, such as "{} samples".
    """

    def __init__(self, what: str):
        self._what = what
        self._held: dict[str, int] = {}
        self.total = 0

    def check(self, tenant: str, amount: int, limit: int, aside: int = 0) -> None:
        """Raise `Busy` unless the tenant may use `amount` more.

        Args:
            tenant: The tenant.
            amount: Additional use.
            limit: Limit for all tenants together.
            aside: Part of the tenant's use that is not counted.
        """
        if not self.has_room(tenant, amount, limit, aside):
            raise Busy(
                f"{self._what.format(self._held[tenant])} of this sender are queued already, which may have "
                f"{self._share(tenant, limit)} at a time now; send this one again in a second"
            )

    def has_room(self, tenant: str, amount: int, limit: int, aside: int = 0) -> bool:
        """Return True if `check` would admit the request."""
        own = self._held.get(tenant, 0) - aside
        return not own or own + amount <= self._share(tenant, limit)

    def _share(self, tenant: str, limit: int) -> int:
        """Return the amount that a tenant may use at the current use of the others."""
        return max(0, limit - (self.total - self._held.get(tenant, 0))) // 2

    def add(self, tenant: str, amount: int) -> None:
        """Add `amount` to a tenant's use, regardless of the limit."""
        self._held[tenant] = self._held.get(tenant, 0) + amount
        self.total += amount

    def remove(self, tenant: str, amount: int) -> None:
        """Subtract `amount` from a tenant's use."""
        self.total -= amount
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]

    @contextmanager
    def reserved(self, tenant: str, amount: int, limit: int, aside: int = 0) -> Iterator[None]:
        """Context that reserves `amount`. Raises `Busy` if the quota is exceeded."""
        self.check(tenant, amount, limit, aside)
        self.add(tenant, amount)
        try:
            yield
        finally:
            self.remove(tenant, amount)
