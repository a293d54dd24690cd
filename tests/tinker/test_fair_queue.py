"""The fair queue, with plain values."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from skyrl.tinker.engine.fair_queue import FairQueue

COSTS = st.lists(st.integers(1, 100), min_size=1, max_size=40)


def drain(queue: FairQueue[str]) -> list[str]:
    """Everything that may go now."""
    return list(iter(queue.next, None))


def filled(window: int, *items: tuple[str, str, int]) -> FairQueue[str]:
    """A queue of (key, tenant, cost), one lane per tenant."""
    queue: FairQueue[str] = FairQueue(window)
    for key, tenant, cost in items:
        queue.add(key, tenant, "lane", cost, key)
    return queue


@given(costs=st.lists(COSTS, min_size=2, max_size=5), window=st.integers(1, 300))
def test_tenants_with_waiting_work_are_served_equally_up_to_the_largest_item(costs, window):
    queue: FairQueue[tuple[int, int]] = FairQueue(window)
    for tenant, own in enumerate(costs):
        for i, cost in enumerate(own):
            queue.add(f"{tenant}/{i}", str(tenant), "lane", cost, (tenant, i))
    served = [0] * len(costs)
    left = [len(own) for own in costs]
    while (value := queue.next()) is not None:
        tenant, i = value
        served[tenant] += costs[tenant][i]
        left[tenant] -= 1
        queue.done(f"{tenant}/{i}")
        backlogged = [served[t] for t in range(len(costs)) if left[t]]
        assert not backlogged or max(backlogged) - min(backlogged) <= 100
    assert not any(left)


WEIGHTS = st.fixed_dictionaries({str(tenant): st.sampled_from([0.001, 0.25, 1, 3, 1000]) for tenant in range(5)})


@given(costs=st.lists(COSTS, min_size=2, max_size=5), window=st.integers(1, 300), weights=WEIGHTS)
def test_tenants_with_waiting_work_are_served_by_their_weights_up_to_their_largest_item(costs, window, weights):
    queue: FairQueue[tuple[int, int]] = FairQueue(window, weights=weights)
    for tenant, own in enumerate(costs):
        for i, cost in enumerate(own):
            queue.add(f"{tenant}/{i}", str(tenant), "lane", cost, (tenant, i))
    served, left = [0.0] * len(costs), [len(own) for own in costs]
    while (value := queue.next()) is not None:
        tenant, i = value
        served[tenant] += costs[tenant][i] / weights[str(tenant)]
        left[tenant] -= 1
        queue.done(f"{tenant}/{i}")
        for ahead in range(len(costs)):
            for behind in range(len(costs)):
                if left[ahead] and left[behind]:
                    assert served[ahead] - served[behind] <= 101 / weights[str(ahead)]
    assert not any(left)


@given(
    weight=st.sampled_from([0.001, 1, 1000]),
    flood=st.lists(st.integers(1, 1000), min_size=1, max_size=30),
    cost=st.integers(1, 1000),
)
def test_a_tenant_with_nothing_in_the_window_sends_one_item_at_once_whatever_it_weighs(weight, flood, cost):
    queue: FairQueue[str] = FairQueue(100, weights={"a": 1 / weight, "b": weight})
    for i in range(3):  # whatever it has had before
        queue.add(f"before{i}", "b", "lane", cost, "before")
        drain(queue)
        queue.done(f"before{i}")
    for i, own in enumerate(flood):
        queue.add(f"a{i}", "a", "lane", own, "flood")
    queue.add("b", "b", "lane", cost, "small")
    assert "small" in drain(queue)


@given(
    items=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(1, 50)), max_size=60),
    window=st.integers(1, 100),
)
def test_everything_leaves_once_and_lanes_stay_in_order(items, window):
    queue: FairQueue[int] = FairQueue(window)
    for i, (tenant, lane, cost) in enumerate(items):
        queue.add(str(i), tenant, lane, cost, i)
    order = []
    while (i := queue.next()) is not None:
        order.append(i)
        assert queue.done(str(i))
    assert sorted(order) == list(range(len(items)))
    for place in {item[:2] for item in items}:
        mine = [i for i in order if items[i][:2] == place]
        assert mine == sorted(mine)


def test_a_flood_stays_in_the_queue():
    queue = filled(10, *((f"flood{i}", "a", 2) for i in range(100)))
    assert len(drain(queue)) == 5
    assert len(queue) == 95


def test_a_full_window_still_admits_one_item_of_a_tenant_that_has_none_in_it():
    queue = filled(10, *((f"flood{i}", "a", 2) for i in range(100)))
    drain(queue)
    queue.add("b0", "b", "lane", 50, "b0")
    queue.add("b1", "b", "lane", 50, "b1")
    assert drain(queue) == ["b0"]
    queue.done("b0")
    assert drain(queue) == ["b1"]


def test_an_item_larger_than_the_window_leaves_room_for_three_more():
    queue = filled(100, *((f"huge{i}", "a", 10**9) for i in range(6)))
    assert len(drain(queue)) == 4


def test_a_window_leaves_room_for_as_many_items_as_it_is_told():
    queue: FairQueue[str] = FairQueue(1600, at_least=16)
    for i in range(30):
        queue.add(f"huge{i}", "a", f"lane{i}", 10**9, f"huge{i}")
    assert len(drain(queue)) == 16


def test_a_tenant_takes_turns_between_its_lanes():
    queue: FairQueue[str] = FairQueue(100)
    for lane, key in [("x", "x0"), ("x", "x1"), ("x", "x2"), ("y", "y0")]:
        queue.add(key, "a", lane, 1, key)
    assert drain(queue) == ["x0", "y0", "x1", "x2"]


def test_time_without_requests_earns_no_advantage():
    queue = filled(1, *((f"a{i}", "a", 10) for i in range(30)))
    for i in range(10):
        assert queue.next() == f"a{i}"
        queue.done(f"a{i}")
    for i in range(10):
        queue.add(f"b{i}", "b", "lane", 10, f"b{i}")
    first = []
    for _ in range(10):
        key = queue.next()
        assert key is not None
        first.append(key[0])
        queue.done(key)
    assert Counter(first) == {"a": 5, "b": 5}


def test_a_removed_item_never_leaves():
    queue = filled(100, ("a0", "a", 1), ("a1", "a", 1))
    assert queue.remove("a0")
    assert not queue.remove("a0")
    assert drain(queue) == ["a1"]


def test_a_key_that_is_here_already_is_ignored():
    queue = filled(100, ("a0", "a", 1), ("a0", "a", 1))
    assert drain(queue) == ["a0"]
    queue.add("a0", "a", "lane", 1, "a0")
    assert drain(queue) == []
