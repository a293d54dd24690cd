"""How much may wait at a time: so much of all tenants together, and at most half of that of one tenant.

So a tenant whose requests are not served, because they are too many or wait for one that does not come, leaves room for
the others. Where nothing waits there is room for anything.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from skyrl.tinker.submission import Busy


class Quota:
    """Counts what waits. Limits are given with each question.

    Args:
        what: What is counted, with braces for the number, such as "{} samples".
    """

    def __init__(self, what: str):
        self._what = what
        self._held: dict[str, int] = {}
        self.total = 0

    def check(self, tenant: str | None, amount: int, limit: int) -> None:
        """Raise `Busy` unless `amount` more may wait. A tenant that is not known (None) has no share of its own."""
        own = self._held.get(tenant, 0) if tenant is not None else 0
        if own and own + amount > limit // 2:
            raise Busy(
                f"{self._what.format(own)} of this sender are queued already, which may have {limit // 2} at a time; "
                "send this one again in a second"
            )
        if self.total and self.total + amount > limit:
            raise Busy(f"{self._what.format(self.total)} are queued already; send this one again in a second")

    def add(self, tenant: str, amount: int) -> None:
        """Count `amount` more, whatever the limit."""
        self._held[tenant] = self._held.get(tenant, 0) + amount
        self.total += amount

    def remove(self, tenant: str, amount: int) -> None:
        """`amount` waits no more."""
        self.total -= amount
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]

    @contextmanager
    def reserved(self, tenant: str, amount: int, limit: int) -> Iterator[None]:
        """Keep room for `amount` until the end of the block. Raises `Busy` if there is none."""
        self.check(tenant, amount, limit)
        self.add(tenant, amount)
        try:
            yield
        finally:
            self.remove(tenant, amount)
