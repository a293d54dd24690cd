"""Fair queuing of tenants: the waiting tenant with the least service goes next.

Service counts as cost divided by the tenant's weight, so tenants that wait all the time are served in proportion to
their weights. Idle time earns no credit: a tenant that begins to wait starts at the least service of the waiting
tenants, or at its own service if that is higher. When no tenant waits, all accounts are reset. (An endless stream of
new tenants would thus always go before tenants that have been served. With API keys, there is no such stream.)

Pure: no threads, no clock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

SCALE = 2**20
"""Service is an integer, in 1 / SCALE of a token at weight 1, so sums are exact."""

LIGHTEST, HEAVIEST = 0.001, 1000.0
"""Bounds of weights. Within them, the price of a token is far from zero."""

MOST_NOTES = 4
"""Maximum number of heap entries per waiting tenant."""

Rank = tuple[int, int]


@dataclass
class _Account:
    service: int
    turn: int
    """Sequence number of the tenant's last event: it began to wait, was charged or lined up. Breaks ties."""


class Accounts:
    """Accounts of the service of each tenant.

    Args:
        weights: Weights of tenants; default 1.
    """

    def __init__(self, weights: Mapping[str, float] | None = None):
        self._weights = dict(weights or {})
        self._accounts: dict[str, _Account] = {}
        """Accounts of waiting tenants, and of tenants with more service than the least served waiting tenant."""
        self._waiting: set[str] = set()
        self._levels: list[tuple[int, str]] = []
        """Heap of the service of each waiting tenant.

        It may contain outdated entries, which are dropped when they reach the top.
        """
        self._turns = 0

    def enter(self, tenant: str) -> None:
        """Record that a tenant begins to wait."""
        least = self._least() if self._waiting else 0
        paid = [name for name, account in self._accounts.items() if account.service <= least]
        for name in paid:
            if name not in self._waiting:
                del self._accounts[name]
        account = self._accounts.setdefault(tenant, _Account(least, 0))
        account.turn = self._next_turn()
        self._waiting.add(tenant)
        self._note(tenant)

    def leave(self, tenant: str) -> None:
        """Record that a tenant no longer waits."""
        self._waiting.remove(tenant)
        if not self._waiting:
            self._accounts.clear()
            self._levels.clear()

    def charge(self, tenant: str, cost: int) -> None:
        """Charge a tenant for `cost` tokens of service; a negative cost is a refund.

        The charge of a tenant that is not waiting takes effect when it begins to wait. While no tenant waits, charges
        are ignored and earlier ones are forgotten.
        """
        if not self._waiting:
            return
        account = self._accounts.setdefault(tenant, _Account(self._least(), 0))
        account.service += self.price(tenant, cost)
        account.turn = self._next_turn()
        if tenant in self._waiting:
            self._note(tenant)

    def line_up(self, tenant: str) -> None:
        """Put a waiting tenant behind all others with the same service, because its previous work has ended.

        Tenants with the same service that already wait then go first, and tenants that begin to wait later do not.
        """
        self._accounts[tenant].turn = self._next_turn()

    def rank(self, tenant: str) -> Rank:
        """Return the rank of a tenant: the waiting tenant with the lowest rank goes next."""
        account = self._accounts[tenant]
        return account.service, account.turn

    def first(self, tenants: Iterable[str]) -> str:
        """Return the tenant that goes next among these waiting tenants."""
        return min(tenants, key=self.rank)

    def may_go_early(self, tenant: str, cost: int) -> bool:
        """Return True if a tenant may be served before its turn, because its work fits into the current batch.

        This is allowed if the tenant's service exceeds the least service of waiting tenants by at most the price of
        this work.
        """
        return self._accounts[tenant].service <= self._least() + self.price(tenant, cost)

    def _least(self) -> int:
        while True:
            service, tenant = self._levels[0]
            if tenant in self._waiting and self._accounts[tenant].service == service:
                return service
            heappop(self._levels)

    def _note(self, tenant: str) -> None:
        """Add the current service of a waiting tenant to the heap."""
        heappush(self._levels, (self._accounts[tenant].service, tenant))
        if len(self._levels) > MOST_NOTES * len(self._waiting):
            self._levels = [(self._accounts[name].service, name) for name in self._waiting]
            heapify(self._levels)

    def price(self, tenant: str, cost: int) -> int:
        """Return the increase in service for `cost` tokens, in the units of ranks."""
        return round(cost * SCALE / self._weights.get(tenant, 1))

    def _next_turn(self) -> int:
        self._turns += 1
        return self._turns
