"""Quotas on what is held at a time, shared so that no tenants together can keep another one out.

A tenant may hold as much as it leaves free: half of what the others do not hold. So one that is alone has half of the
limit; of n that take all they can, each ends with a part of 1/(n + 1). One that holds nothing is let in with one
request, whatever its size and whatever the others hold: the total stays below the limit and one request of each tenant.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class Busy(Exception):
    """Too much is held; the client should send the request again in a moment."""


class Quota:
    """Counts what is held. Limits are given with each question.

    Args:
        what: What is counted, with braces for the number, such as "{} samples".
    """

    def __init__(self, what: str):
        self._what = what
        self._held: dict[str, int] = {}
        self.total = 0

    def check(self, tenant: str, amount: int, limit: int, aside: int = 0) -> None:
        """Raise `Busy` unless `amount` more may be held.

        Args:
            tenant: Who would hold it.
            amount: How much more.
            limit: Of all tenants together.
            aside: How much of what the tenant holds is not counted.
        """
        if not self.has_room(tenant, amount, limit, aside):
            raise Busy(
                f"{self._what.format(self._held[tenant])} of this sender are queued already, which may have "
                f"{self._share(tenant, limit)} at a time now; send this one again in a second"
            )

    def has_room(self, tenant: str, amount: int, limit: int, aside: int = 0) -> bool:
        """Return True if `check` lets it in."""
        own = self._held.get(tenant, 0) - aside
        return not own or own + amount <= self._share(tenant, limit)

    def _share(self, tenant: str, limit: int) -> int:
        """Amount that a tenant may hold while the others hold what they do."""
        return max(0, limit - (self.total - self._held.get(tenant, 0))) // 2

    def add(self, tenant: str, amount: int) -> None:
        """Count `amount` more, whatever the limit."""
        self._held[tenant] = self._held.get(tenant, 0) + amount
        self.total += amount

    def remove(self, tenant: str, amount: int) -> None:
        """`amount` is held no more."""
        self.total -= amount
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]

    @contextmanager
    def reserved(self, tenant: str, amount: int, limit: int, aside: int = 0) -> Iterator[None]:
        """Keep room for `amount` until the end of the block. Raises `Busy` if there is none."""
        self.check(tenant, amount, limit, aside)
        self.add(tenant, amount)
        try:
            yield
        finally:
            self.remove(tenant, amount)
