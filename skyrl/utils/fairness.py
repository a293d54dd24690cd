"""The rule of fairness, wherever tenants wait for the same thing: who was served least goes next.

What a tenant is given counts as its cost divided by the tenant's weight, so tenants that wait all the time are served
in proportion to their weights. Time without waiting earns nothing: who begins to wait starts level with the one served
least of those that wait, or where it stood, if that is further. When nobody waits, all are level again. (So tenants
that never were before, in a stream that always has some waiting, go before who was served. With keys there is no such
stream.)

Pure: no threads, no clock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

SCALE = 2**20
"""Service is a whole number, in 1 / SCALE of a token at weight 1: sums lose nothing, however long they grow."""

LIGHTEST, HEAVIEST = 0.001, 1000.0
"""Bounds of weights. The price of a token is far from zero at all of them."""

MOST_NOTES = 4
"""Notes of services that are kept for each tenant that waits."""

Rank = tuple[int, int]


@dataclass
class _Account:
    service: int
    turn: int
    """Turn at which it was served last, or began to wait; decides between accounts of equal service."""


class Accounts:
    """Accounts of what each tenant has been given.

    Args:
        weights: Of tenants; all others weigh 1.
    """

    def __init__(self, weights: Mapping[str, float] | None = None):
        self._weights = dict(weights or {})
        self._accounts: dict[str, _Account] = {}
        """Accounts of those that wait, and of those that have been given more than the one served least of them."""
        self._waiting: set[str] = set()
        self._levels: list[tuple[int, str]] = []
        """A heap of the service of each that waits, and of what is true no more: that is dropped when it comes up."""
        self._turns = 0

    def enter(self, tenant: str) -> None:
        """A tenant that did not wait begins to."""
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
        """A tenant waits for nothing any more."""
        self._waiting.remove(tenant)
        if not self._waiting:
            self._accounts.clear()
            self._levels.clear()

    def charge(self, tenant: str, cost: int) -> None:
        """A tenant is given something that costs so many tokens; fewer than 0 are given back.

        One that does not wait will stand where it then is when it does, if others wait all the time until then.
        """
        if not self._waiting:
            return
        account = self._accounts.setdefault(tenant, _Account(self._least(), 0))
        account.service += self.price(tenant, cost)
        account.turn = self._next_turn()
        if tenant in self._waiting:
            self._note(tenant)

    def line_up(self, tenant: str) -> None:
        """A tenant that waits goes behind all others of its service: what it was given has come to its end.

        Those that began to wait meanwhile then go first, and those that begin to wait from now on do not.
        """
        self._accounts[tenant].turn = self._next_turn()

    def rank(self, tenant: str) -> Rank:
        """Rank of a tenant: of those that wait, the one with the lowest rank goes next."""
        account = self._accounts[tenant]
        return account.service, account.turn

    def first(self, tenants: Iterable[str]) -> str:
        """Tenant that goes next of these, which wait."""
        return min(tenants, key=self.rank)

    def may_go_early(self, tenant: str, cost: int) -> bool:
        """Return True if a tenant may be served before its turn, because its work fits what runs now.

        It may if the tenant is ahead of the one served least by no more than the price of that.
        """
        return self._accounts[tenant].service <= self._least() + self.price(tenant, cost)

    def _least(self) -> int:
        while True:
            service, tenant = self._levels[0]
            if tenant in self._waiting and self._accounts[tenant].service == service:
                return service
            heappop(self._levels)

    def _note(self, tenant: str) -> None:
        """The service of a tenant that waits has become what it is."""
        heappush(self._levels, (self._accounts[tenant].service, tenant))
        if len(self._levels) > MOST_NOTES * len(self._waiting):
            self._levels = [(self._accounts[name].service, name) for name in self._waiting]
            heapify(self._levels)

    def price(self, tenant: str, cost: int) -> int:
        """Advance of a tenant once it is given so many tokens, as in its rank."""
        return round(cost * SCALE / self._weights.get(tenant, 1))

    def _next_turn(self) -> int:
        self._turns += 1
        return self._turns
