"""Turns to compute: fair between tenants, in turns between the models of a tenant.

A model stands in the line of the tenant that its next operation belongs to. Tenants go by what they were served, see
`skyrl.utils.fairness`. The models of a tenant take turns.

With Q the most that a turn of tenant i costs and w its weight, i is never ahead of another that waits by more than
Q / w without companions (`may_join`), and 2 Q / w with them. A tenant that begins to wait has its turn after what runs
as it comes and one turn of each other tenant at most, whatever they send; tenants that it comes to while they are being
served go after it, and so do models of its own.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Mapping

from skyrl.utils.fairness import Accounts


class FairScheduler:
    """The models that have something to do.

    Args:
        weights: Of tenants; all others weigh 1.
    """

    def __init__(self, weights: Mapping[str, float] | None = None):
        self._accounts = Accounts(weights)
        self._lines: dict[str, dict[str, None]] = {}
        """Models of each tenant that waits, the one whose turn it is first."""
        self._tenants: dict[str, str] = {}
        self._served: dict[str, str] = {}
        """Models that have had a turn since the last order, and the tenants that it was charged to."""

    def __len__(self) -> int:
        return len(self._tenants)

    def place(self, model_id: str, tenant: str) -> None:
        """A model has something to do for a tenant. It keeps its place if it stands in that line."""
        if self._tenants.get(model_id) == tenant:
            return
        if tenant not in self._lines:
            self._accounts.enter(tenant)
            self._lines[tenant] = {}
        if model_id in self._tenants:
            self.remove(model_id)
        self._lines[tenant][model_id] = None
        self._tenants[model_id] = tenant

    def remove(self, model_id: str) -> None:
        """A model has nothing to do any more."""
        tenant = self._tenants.pop(model_id)
        del self._lines[tenant][model_id]
        if not self._lines[tenant]:
            del self._lines[tenant]
            self._accounts.leave(tenant)

    def order(self) -> Iterator[str]:
        """Each model once, in the order of their turns. What is charged meanwhile counts for those that follow.

        What was charged before has come to its end.
        """
        self._line_up()
        lines: dict[str, deque[str]] = {}
        heap = [(self._accounts.rank(tenant), tenant) for tenant in self._lines]
        heapq.heapify(heap)
        while heap:
            _, tenant = heapq.heappop(heap)
            if (line := lines.get(tenant)) is None:
                line = lines[tenant] = deque(self._lines[tenant])
            yield line.popleft()
            if line:
                heapq.heappush(heap, (self._accounts.rank(tenant), tenant))

    def charge(self, model_id: str, cost: int) -> None:
        """A model has its turn, which costs so many tokens. Once that has ended, it goes to the end of its line."""
        tenant = self._tenants[model_id]
        self._served[model_id] = tenant
        self._accounts.charge(tenant, cost)

    def may_join(self, model_id: str, cost: int) -> bool:
        """Return True if a turn of so many tokens may be had now, with another model's, though it is not its own yet.

        It may not where weights or the number of a tenant's models would cease to matter.
        """
        return self._accounts.may_go_early(self._tenants[model_id], cost)

    def _line_up(self) -> None:
        """Let those that were served stand behind those that came meanwhile."""
        for model_id, charged in self._served.items():
            if charged in self._lines:
                self._accounts.line_up(charged)
            if (tenant := self._tenants.get(model_id)) is not None:
                line = self._lines[tenant]
                del line[model_id]
                line[model_id] = None
                self._accounts.line_up(tenant)
        self._served.clear()
