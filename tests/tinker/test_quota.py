"""Shares of a limit: whoever holds nothing is let in, whatever the others do, and the total stays bounded."""

from hypothesis import given
from hypothesis import strategies as st

from skyrl.utils.quota import Busy, Quota

LIMIT = 100
LARGEST = 150
TENANTS = ("a", "b", "c", "d", "e")
STEPS = st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, LARGEST) | st.none()), max_size=200)
"""Of a tenant: it asks for so much, or gives back what it has had longest."""


def taken(quota: Quota, tenant: str, amount: int) -> bool:
    try:
        quota.check(tenant, amount, LIMIT)
    except Busy:
        return False
    quota.add(tenant, amount)
    return True


@given(STEPS)
def test_whoever_holds_nothing_is_let_in_and_the_total_stays_bounded(steps):
    quota, held = Quota("{}"), {tenant: [] for tenant in TENANTS}
    for tenant, amount in steps:
        if amount is None:
            if held[tenant]:
                quota.remove(tenant, held[tenant].pop(0))
        else:
            empty = not held[tenant]
            if taken(quota, tenant, amount):
                held[tenant].append(amount)
            else:
                assert not empty, f"{tenant} holds nothing and was turned away"
        firsts = sum(max(own) for own in held.values() if own)
        assert quota.total == sum(map(sum, held.values())) <= LIMIT + firsts


@given(st.permutations(TENANTS), st.integers(1, 5))
def test_tenants_that_take_all_they_can_leave_room_for_the_next(order, size):
    quota, held = Quota("{}"), []
    for tenant in order[:3]:
        count = 0
        while taken(quota, tenant, size):
            count += 1
        held.append(count * size)
    assert min(held) >= size
    assert sum(held) <= LIMIT + size


def test_tenants_that_come_and_go_end_with_equal_parts():
    quota, held = Quota("{}"), dict.fromkeys(TENANTS[:4], 0)
    for turn in range(2000):
        tenant = TENANTS[turn % 4]
        if held[tenant] and turn % 3 == 0:
            quota.remove(tenant, 1)
            held[tenant] -= 1
        held[tenant] += taken(quota, tenant, 1)
        held[tenant] += taken(quota, tenant, 1)
    assert max(held.values()) - min(held.values()) <= 1
    assert max(held.values()) == LIMIT // 5
