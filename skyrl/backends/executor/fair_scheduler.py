"""Scheduler that gives models turns in which their operations are computed.

Turns are fair between tenants, and round-robin between the models of a tenant.

A model waits in the queue of the tenant of its next operation. Tenants are ordered by the service that they have
received (`skyrl.utils.fairness`).

Bounds: let Q be the largest cost of a turn of tenant i, and w the weight of i. The service of i never exceeds the
service of another waiting tenant by more than Q / w without companions (`may_join`), or 2 Q / w with companions. A
tenant that starts to wait gets a turn after the current dispatches and at most one turn of each other tenant, whatever
they send. Tenants that are being served when it arrives come after it. In the same way, a model that is being served
comes after models of its tenant that arrive meanwhile.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Mapping

from skyrl.utils.fairness import Accounts


class FairScheduler:
    """Models with work, in the order of their turns.

    Args:
        weights: Weights of tenants; the default weight is 1.
    """

    def __init__(self, weights: Mapping[str, float] | None = None):
        self._accounts = Accounts(weights)
        self._lines: dict[str, dict[str, None]] = {}
        """Models of each waiting tenant, in round-robin order."""
        self._tenants: dict[str, str] = {}
        self._served: dict[str, str] = {}
        """Models that had a turn since the last `order`, each with the tenant that was charged."""

    def __len__(self) -> int:
        return len(self._tenants)

    def place(self, model_id: str, tenant: str) -> None:
        """Add a model that has work for a tenant.

        A model keeps its position if it is already in that tenant's queue.
        """
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
        """Remove a model that has no more work."""
        tenant = self._tenants.pop(model_id)
        del self._lines[tenant][model_id]
        if not self._lines[tenant]:
            del self._lines[tenant]
            self._accounts.leave(tenant)

    def order(self) -> Iterator[str]:
        """Iterate over the models in the order of their turns. Charges during the iteration affect later models.

        Turns that were charged before this call count as ended.
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
        """Charge a model's turn to its tenant, in tokens.

        After the turn, the model goes to the end of its tenant's queue.
        """
        tenant = self._tenants[model_id]
        self._served[model_id] = tenant
        self._accounts.charge(tenant, cost)

    def may_join(self, model_id: str, cost: int) -> bool:
        """Return True if a model may join another model's turn at this cost, ahead of its own turn.

        The tenant's service may exceed the least service of a waiting tenant by at most the price of this cost.
        Otherwise weights would have no effect, and tenants with many models would get a larger share.
        """
        return self._accounts.may_go_early(self._tenants[model_id], cost)

    def _line_up(self) -> None:
        """Move each served model behind the models that arrived meanwhile."""
        for model_id, charged in self._served.items():
            if charged in self._lines:
                self._accounts.line_up(charged)
            if (tenant := self._tenants.get(model_id)) is not None:
                line = self._lines[tenant]
                del line[model_id]
                line[model_id] = None
                self._accounts.line_up(tenant)
        self._served.clear()
