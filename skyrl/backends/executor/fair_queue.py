"""Samples that wait to begin, fair between tenants: who was given least goes next.

A tenant is charged for what is computed: for a prompt when it begins to be read, and for tokens as they are generated,
while anybody waits (`skyrl.utils.fairness`). Samples of one tenant begin in the order of their arrival. A tenant that
begins to wait is next after one sample of each other tenant at most, whatever they have sent.

A sampler keeps its requests here, or does not hand them on, until it has room for them: what has begun keeps its place.
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
    """Tokens of its prompt."""


class FairQueue(Generic[T]):
    """Line of requests that have not begun, with what a sampler knows of each."""

    def __init__(self) -> None:
        self._accounts = Accounts()
        self._lines: dict[str, dict[str, _Waiting[T]]] = {}
        """Requests of each tenant that waits, by id, in the order of arrival."""
        self._tenants: dict[str, str] = {}
        """By request."""

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the weights of tenants, of which all others weigh 1. Before anything is added."""
        assert not self._lines
        self._accounts = Accounts(weights)

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._tenants

    def __iter__(self) -> Iterator[T]:
        """All, a tenant's in the order of arrival."""
        return (waiting.value for line in self._lines.values() for waiting in line.values())

    def get(self, request_id: str) -> T | None:
        """Knowledge of a request; None if it does not wait."""
        tenant = self._tenants.get(request_id)
        return None if tenant is None else self._lines[tenant][request_id].value

    @property
    def tenants(self) -> Set[str]:
        """Tenants that wait."""
        return self._lines.keys()

    def add(self, request: Sample, value: T) -> None:
        """A request begins to wait."""
        if request.tenant not in self._lines:
            self._accounts.enter(request.tenant)
            self._lines[request.tenant] = {}
        self._lines[request.tenant][request.request_id] = _Waiting(value, len(request.prompt))
        self._tenants[request.request_id] = request.tenant

    def order(self, most: int | None = None) -> Iterator[T]:
        """In which order they begin, if each finds room; of a long line about `most`, some of each tenant's.

        Nothing that is done meanwhile changes it.
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
        """A request waits no more, and its tenant is charged for its prompt."""
        tenant = self._tenants[request_id]
        self.charge(tenant, self._lines[tenant][request_id].cost)
        return self._leave(request_id)

    def remove(self, request_id: str) -> T | None:
        """A request is not wanted any more. Returns what is known of it; None if it does not wait."""
        return self._leave(request_id) if request_id in self._tenants else None

    def charge(self, tenant: str, tokens: int) -> None:
        """Tokens were generated for a tenant or, if fewer than 0, did not have to be read."""
        self._accounts.charge(tenant, tokens)

    def _leave(self, request_id: str) -> T:
        tenant = self._tenants.pop(request_id)
        waiting = self._lines[tenant].pop(request_id)
        if not self._lines[tenant]:
            del self._lines[tenant]
            self._accounts.leave(tenant)
        return waiting.value
