"""The rule of fairness, with plain numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl.utils.fairness import HEAVIEST, LIGHTEST, SCALE, Accounts


def served(accounts: Accounts, tenants: str, turns: int, cost: int = 1) -> str:
    """Return the order of tenants that all wait all the time."""
    order = ""
    for _ in range(turns):
        order += accounts.first(tenants)
        accounts.charge(order[-1], cost)
    return order


def entered(tenants: str, weights: dict[str, float] | None = None) -> Accounts:
    accounts = Accounts(weights)
    for tenant in tenants:
        accounts.enter(tenant)
    return accounts


def test_equals_take_turns_in_the_order_in_which_they_came():
    assert served(entered("abc"), "abc", 7) == "abcabca"


def test_tenants_are_served_in_proportion_to_their_weights():
    order = served(entered("abc", {"a": 4, "c": 0.5}), "abc", 11 * 20)
    assert [order.count(tenant) for tenant in "abc"] == [8 * 20, 2 * 20, 20]


def test_time_without_waiting_earns_nothing():
    accounts = entered("ab")
    accounts.leave("b")
    served(accounts, "a", 100)
    accounts.enter("b")
    assert served(accounts, "ab", 10).count("b") == 5


def test_who_was_served_more_than_others_does_not_lose_that_by_leaving():
    accounts = entered("ab")
    accounts.charge("a", 10)
    accounts.leave("a")
    accounts.enter("a")
    assert served(accounts, "ab", 12) == "b" * 10 + "ab"


def test_who_comes_again_and_again_does_not_overtake_who_has_waited():
    accounts = entered("a")
    for number in range(3):
        accounts.enter(f"new{number}")
        assert accounts.first(["a", f"new{number}"]) == "a"
        accounts.charge("a", 1)
        accounts.charge(f"new{number}", 1)
        accounts.leave(f"new{number}")


def test_who_lines_up_goes_behind_those_of_its_service_that_came_before():
    accounts = entered("ab")
    accounts.charge("b", 5)
    accounts.charge("a", 5)
    accounts.enter("c")
    accounts.line_up("a")
    accounts.enter("d")
    assert served(accounts, "abcd", 4, cost=5) == "bcad"


def test_all_are_level_again_when_nobody_waits():
    accounts = entered("ab")
    accounts.charge("a", 10**9)
    for tenant in "ab":
        accounts.leave(tenant)
    for tenant in "ab":
        accounts.enter(tenant)
    assert served(accounts, "ab", 4) == "abab"


def test_tenants_that_have_gone_are_forgotten_once_others_have_been_served_as_much():
    accounts = entered("a")
    for number in range(1000):
        accounts.enter(f"new{number}")
        accounts.charge(f"new{number}", 5)
        accounts.leave(f"new{number}")
        accounts.charge("a", 1)
    assert len(accounts._accounts) < 10


def test_something_may_go_early_for_who_is_ahead_by_no_more_than_its_price():
    accounts = entered("ab", {"a": 2})
    accounts.charge("a", 10)
    assert accounts.may_go_early("a", 10) and not accounts.may_go_early("a", 9)


@pytest.mark.parametrize("weight", [LIGHTEST, HEAVIEST])
def test_no_sum_is_too_large_to_notice_a_token(weight):
    accounts = entered("ab", {"a": weight})
    for tenant in "ab":
        accounts.charge(tenant, 10**18 if tenant == "b" else round(weight * 10**18))
    before = accounts.rank("a")[0]
    accounts.charge("a", 1)
    assert accounts.rank("a")[0] > before


@given(
    weights=st.fixed_dictionaries({tenant: st.floats(LIGHTEST, HEAVIEST) for tenant in "abc"}),
    costs=st.lists(st.integers(1, 1000), min_size=1, max_size=200),
)
def test_nobody_is_ahead_by_more_than_the_price_of_its_largest_cost(weights, costs):
    accounts, given_to = entered("abc", weights), dict.fromkeys("abc", 0)
    for cost in costs:
        tenant = accounts.first("abc")
        accounts.charge(tenant, cost)
        given_to[tenant] += cost
        share = {name: given_to[name] / weights[name] for name in "abc"}
        for name in "abc":
            assert share[name] - min(share.values()) <= (max(costs) / weights[name]) * 1.01


events = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["charge", "leave", "line up"]), st.integers(1, 9))
)


@given(st.fixed_dictionaries({tenant: st.sampled_from([0.5, 1, 2]) for tenant in "abcd"}), events)
def test_what_may_go_early_is_what_the_one_served_least_allows(weights, events):
    accounts, waiting = Accounts(weights), set()
    for tenant, event, cost in events:
        if tenant not in waiting:
            accounts.enter(tenant)
            waiting.add(tenant)
        elif event == "charge":
            accounts.charge(tenant, cost)
        elif event == "line up":
            accounts.line_up(tenant)
        else:
            accounts.leave(tenant)
            waiting.remove(tenant)
        if waiting:
            least = min(accounts.rank(name)[0] for name in waiting)
            for name in waiting:
                allowed = accounts.rank(name)[0] <= least + cost * SCALE / weights[name]
                assert accounts.may_go_early(name, cost) == allowed
