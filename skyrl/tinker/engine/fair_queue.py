"""What many tenants have sent and the backend has not taken yet, with costs in tokens.

Each tenant owns lanes (one per model, or a single one for its samples); a lane is first come, first served. The tenant
served least goes next (`skyrl.utils.fairness`) and takes turns between its own lanes. What has gone and is not done yet
fills a window, so that the backend has enough to do while a flood stays here, where its order can still change. A
tenant with nothing in the window may always send one item, whatever it weighs: nobody waits for another's long request.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from skyrl.utils.fairness import Accounts

T = TypeVar("T")

AT_LEAST = 4
"""Items that fit into a window, however large they are, unless it is told otherwise."""


@dataclass(frozen=True)
class _Item(Generic[T]):
    tenant: str
    lane: Hashable
    cost: int
    value: T


@dataclass
class _Tenant(Generic[T]):
    outstanding: int = 0
    lanes: "OrderedDict[Hashable, OrderedDict[str, _Item[T]]]" = field(default_factory=OrderedDict)
    """Waiting items by lane, the lane whose turn it is first; no lane is empty."""


class FairQueue(Generic[T]):
    """Items of many tenants.

    Args:
        window: Tokens that are outstanding at a time.
        at_least: Items that fit into it: one fills no more than the window divided by this.
        weights: Of tenants; all others weigh 1.
    """

    def __init__(self, window: int, at_least: int = AT_LEAST, weights: Mapping[str, float] | None = None):
        self.window = window
        self._largest_share = window // at_least
        self._accounts = Accounts(weights)
        self._tenants: dict[str, _Tenant[T]] = {}
        self._waiting: dict[str, _Item[T]] = {}
        self._outstanding: dict[str, _Item[T]] = {}
        self._used = 0

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._waiting)

    def add(self, key: str, tenant: str, lane: Hashable, cost: int, value: T) -> bool:
        """Queue `value`, known by `key`, that takes `cost` tokens of work. False, and ignored, if the key is here."""
        if key in self._waiting or key in self._outstanding:
            return False
        owner = self._tenants.setdefault(tenant, _Tenant())
        if not owner.lanes:
            self._accounts.enter(tenant)
        item = self._waiting[key] = _Item(tenant, lane, cost, value)
        owner.lanes.setdefault(lane, OrderedDict())[key] = item
        return True

    def next(self) -> T | None:
        """The next value to start, outstanding from now on until `done`. None: the window is full or nothing waits."""
        full = self._used >= self.window
        able = [name for name, tenant in self._tenants.items() if tenant.lanes and not (full and tenant.outstanding)]
        if not able:
            return None
        name = self._accounts.first(able)
        owner = self._tenants[name]
        lane, items = owner.lanes.popitem(last=False)
        key, item = items.popitem(last=False)
        if items:
            owner.lanes[lane] = items
        self._accounts.charge(name, item.cost)
        if not owner.lanes:
            self._accounts.leave(name)
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
        if not lanes:
            self._accounts.leave(item.tenant)
        self._forget_idle(item.tenant)
        return True

    def _share(self, item: _Item[T]) -> int:
        return min(item.cost, self._largest_share)

    def _forget_idle(self, name: str) -> None:
        if not self._tenants[name].lanes and not self._tenants[name].outstanding:
            del self._tenants[name]
