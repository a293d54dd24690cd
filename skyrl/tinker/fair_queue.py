"""Who goes next when many tenants wait: deficit round robin, with costs in tokens.

Each tenant owns lanes (one per model, or a single one for its samples); a lane is first come, first served. The tenant
with the largest deficit, that is with the fewest tokens served, goes next and takes turns between its own lanes. What
has gone and is not done yet fills a window, so that the backend has enough to do while a flood stays here, where its
order can still change. A tenant with nothing in the window may always send one item: nobody waits for another's long
request.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

LARGEST_SHARE = 4
"""An item fills at most a quarter of the window, so that at least four fit."""


@dataclass(frozen=True)
class _Item(Generic[T]):
    tenant: str
    lane: Hashable
    cost: int
    value: T


@dataclass
class _Tenant(Generic[T]):
    service: int
    """Tokens served, on a scale that all tenants share."""
    turn: int = 0
    """When it was last served; decides between tenants of equal service."""
    outstanding: int = 0
    lanes: "OrderedDict[Hashable, OrderedDict[str, _Item[T]]]" = field(default_factory=OrderedDict)
    """Waiting items by lane, the lane whose turn it is first; no lane is empty."""


class FairQueue(Generic[T]):
    """Items of many tenants, released into a window of `window` tokens."""

    def __init__(self, window: int):
        self.window = window
        self._tenants: dict[str, _Tenant[T]] = {}
        self._waiting: dict[str, _Item[T]] = {}
        self._outstanding: dict[str, _Item[T]] = {}
        self._used = 0
        self._turns = 0
        self._level = 0

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._waiting)

    def add(self, key: str, tenant: str, lane: Hashable, cost: int, value: T) -> bool:
        """Queue `value`, known by `key`, that takes `cost` tokens of work. False, and ignored, if the key is here."""
        if key in self._waiting or key in self._outstanding:
            return False
        owner = self._tenants.setdefault(tenant, _Tenant(self._level))
        if not owner.lanes:
            # Time without a waiting request earns nothing: it starts level with the waiting tenant served least.
            owner.service = max(owner.service, self._lowest())
        item = self._waiting[key] = _Item(tenant, lane, cost, value)
        owner.lanes.setdefault(lane, OrderedDict())[key] = item
        return True

    def next(self) -> T | None:
        """The next value to start, outstanding from now on until `done`. None: the window is full or nothing waits."""
        full = self._used >= self.window
        able = [tenant for tenant in self._tenants.values() if tenant.lanes and not (full and tenant.outstanding)]
        if not able:
            return None
        owner = min(able, key=lambda tenant: (tenant.service, tenant.turn))
        self._level = owner.service
        lane, items = owner.lanes.popitem(last=False)
        key, item = items.popitem(last=False)
        if items:
            owner.lanes[lane] = items
        self._turns += 1
        owner.turn = self._turns
        owner.service += item.cost
        owner.outstanding += 1
        self._used += self._share(item)
        self._outstanding[key] = self._waiting.pop(key)
        return item.value

    def done(self, key: str) -> bool:
        """An outstanding item has ended. Returns whether there was one with this key."""
        item = self._outstanding.pop(key, None)
        if item is None:
            return False
        self._used -= self._share(item)
        self._tenants[item.tenant].outstanding -= 1
        self._forget_idle(item.tenant)
        return True

    def remove(self, key: str) -> bool:
        """Drop a waiting item. Returns whether there was one with this key."""
        item = self._waiting.pop(key, None)
        if item is None:
            return False
        lanes = self._tenants[item.tenant].lanes
        del lanes[item.lane][key]
        if not lanes[item.lane]:
            del lanes[item.lane]
        self._forget_idle(item.tenant)
        return True

    def _lowest(self) -> int:
        return min((tenant.service for tenant in self._tenants.values() if tenant.lanes), default=self._level)

    def _share(self, item: _Item[T]) -> int:
        return min(item.cost, self.window // LARGEST_SHARE)

    def _forget_idle(self, name: str) -> None:
        if not self._tenants[name].lanes and not self._tenants[name].outstanding:
            del self._tenants[name]
