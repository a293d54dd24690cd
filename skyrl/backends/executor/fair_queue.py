"""Queue of samples that have not started, fair between tenants: the tenant with the least service is next.

A tenant is charged for computed tokens while any tenant waits: for a prompt when its prefill starts, and for generated
tokens as they are produced (`skyrl.utils.fairness`). Samples of one tenant start in order of arrival. A tenant whose
first sample arrives waits for at most one sample of each other tenant, whatever they have sent.

A sampler keeps its waiting requests here until it has room for them. Requests that have started are not preempted.
"""

import itertools
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Generic, TypeVar

from skyrl.backends.operations import Sample
from skyrl.utils.fairness import Accounts

T = TypeVar("T")


@dataclass(frozen=True)
class _Waiting(Generic[T]):
    value: T
    cost: int
    """Tokens of the prompt."""


class FairQueue(Generic[T]):
    """Queue of requests that have not started, each with a value for the sampler."""

    def __init__(self) -> None:
        self._accounts = Accounts()
        self._lines: dict[str, dict[str, _Waiting[T]]] = {}
        """Waiting requests of each tenant by id, in order of arrival."""
        self._tenants: dict[str, str] = {}
        """Tenant of each request."""

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the weights of tenants; the default weight is 1. Call before `add`."""
        assert not self._lines
        self._accounts = Accounts(weights)

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._tenants

    def __iter__(self) -> Iterator[T]:
        """Iterate over all requests; requests of one tenant are in order of arrival."""
        return (waiting.value for line in self._lines.values() for waiting in line.values())

    def get(self, request_id: str) -> T | None:
        """Value of a request; None if it is not waiting."""
        tenant = self._tenants.get(request_id)
        return None if tenant is None else self._lines[tenant][request_id].value

    @property
    def tenants(self) -> Set[str]:
        """Tenants with waiting requests."""
        return self._lines.keys()

    def add(self, request: Sample, value: T) -> None:
        """Add a request."""
        if request.tenant not in self._lines:
            self._accounts.enter(request.tenant)
            self._lines[request.tenant] = {}
        self._lines[request.tenant][request.request_id] = _Waiting(value, len(request.prompt))
        self._tenants[request.request_id] = request.tenant

    def order(self, most: int | None = None) -> Iterator[T]:
        """Iterate over requests in the order in which they start if each finds room.

        From a long queue, yields about `most` requests, including some of each tenant. Later changes of the queue do
        not change the order.
        """
        own = None if most is None else -(-most // max(1, len(self._lines)))
        lines = {tenant: iter(list(islice(line.values(), own))) for tenant, line in self._lines.items()}
        heap = [(*self._accounts.rank(tenant), tenant) for tenant in lines]
        heapify(heap)
        turns = itertools.count(max((turn for _, turn, _ in heap), default=0) + 1)
        while heap:
            service, _, tenant = heappop(heap)
            if (waiting := next(lines[tenant], None)) is not None:
                heappush(heap, (service + self._accounts.price(tenant, waiting.cost), next(turns), tenant))
                yield waiting.value

    def begin(self, request_id: str) -> T:
        """Remove a request that starts, and charge its tenant for the prompt."""
        tenant = self._tenants[request_id]
        self.charge(tenant, self._lines[tenant][request_id].cost)
        return self._leave(request_id)

    def remove(self, request_id: str) -> T | None:
        """Remove a request. Returns its value; None if it is not waiting."""
        return self._leave(request_id) if request_id in self._tenants else None

    def charge(self, tenant: str, tokens: int) -> None:
        """Charge a tenant for generated tokens. A negative number credits prompt tokens found in the cache."""
        self._accounts.charge(tenant, tokens)

    def _leave(self, request_id: str) -> T:
        tenant = self._tenants.pop(request_id)
        waiting = self._lines[tenant].pop(request_id)
        if not self._lines[tenant]:
            del self._lines[tenant]
            self._accounts.leave(tenant)
        return waiting.value
