"""Order of samples, simulated: tenants with weights, requests of any length, rows that are full. The oracle
adds up what each tenant was given.
"""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skyrl.backends.executor import FairQueue
from skyrl.backends.operations import Sample
from skyrl.types import SamplingParams

COSTS = st.lists(st.integers(1, 100), min_size=1, max_size=40)
WEIGHTS = st.fixed_dictionaries({str(tenant): st.sampled_from([0.001, 0.25, 1, 3, 1000]) for tenant in range(5)})


def a_sample(name: str, tenant: str, length: int = 1) -> Sample:
    params = SamplingParams(max_tokens=1, seed=0)
    return Sample(request_id=name, tenant=tenant, version=None, prompt=np.zeros(length, np.int32), params=params)


def line_of(*samples: Sample, weights: dict[str, float] | None = None) -> FairQueue[Sample]:
    line: FairQueue[Sample] = FairQueue()
    line.weigh(weights or {})
    for sample in samples:
        line.add(sample, sample)
    return line


def begin(line: FairQueue[Sample]) -> Sample:
    return line.begin(next(line.order()).request_id)


@given(costs=st.lists(COSTS, min_size=2, max_size=5), weights=WEIGHTS, generated=st.integers(0, 100))
def test_tenants_that_wait_are_given_tokens_by_their_weights_up_to_one_sample_of_each(costs, weights, generated):
    samples = [a_sample(f"{t}/{i}", str(t), cost) for t, own in enumerate(costs) for i, cost in enumerate(own)]
    line, given_to = line_of(*samples, weights=weights), Counter[str]()
    while len(line):
        sample = begin(line)
        line.charge(sample.tenant, generated)
        given_to[sample.tenant] += len(sample.prompt) + generated
        waiting = list(line.tenants)
        for ahead in waiting:
            for behind in waiting:
                lead = given_to[ahead] / weights[ahead] - given_to[behind] / weights[behind]
                assert lead <= (200 + 1) / weights[ahead]


@given(flood=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 1000)), min_size=1, max_size=60), data=st.data())
def test_a_tenant_that_begins_to_wait_is_next_after_one_sample_of_each_other_at_most(flood, data):
    line = line_of(*(a_sample(f"{number}", tenant, cost) for number, (tenant, cost) in enumerate(flood)))
    for _ in range(data.draw(st.integers(0, len(flood)))):
        line.charge(begin(line).tenant, data.draw(st.integers(0, 1000)))
    late = a_sample("late", "z", 1000)
    line.add(late, late)
    before = Counter[str]()
    while (sample := begin(line)) is not late:
        before[sample.tenant] += 1
        line.charge(sample.tenant, data.draw(st.integers(0, 1000)))
    assert all(number == 1 for number in before.values())


@given(items=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=60), data=st.data())
def test_everything_begins_once_and_a_tenants_in_the_order_of_arrival(items, data):
    line = line_of(*(a_sample(str(i), tenant, cost) for i, (tenant, cost) in enumerate(items)))
    cancelled = data.draw(st.sets(st.integers(0, len(items) - 1)))
    for i in cancelled:
        assert line.remove(str(i)) is not None and line.remove(str(i)) is None
    order = []
    while len(line):
        order.append(int(begin(line).request_id))
    assert sorted(order) == [i for i in range(len(items)) if i not in cancelled]
    for tenant in "abc":
        mine = [i for i in order if items[i][0] == tenant]
        assert mine == sorted(mine)


@given(items=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=60), weights=WEIGHTS)
def test_the_order_that_is_told_is_that_in_which_they_begin(items, weights):
    weights = dict(zip("abc", weights.values(), strict=False))
    line = line_of(*(a_sample(str(i), tenant, cost) for i, (tenant, cost) in enumerate(items)), weights=weights)
    told = [sample.request_id for sample in line.order()]
    assert told == [begin(line).request_id for _ in range(len(line))]


def test_of_a_long_line_some_of_each_tenants_are_told():
    flood = [a_sample(f"flood{i}", "a") for i in range(100)]
    told = list(line_of(*flood, a_sample("late", "b")).order(most=10))
    assert [sample.request_id for sample in told] == ["flood0", "late", *(f"flood{i}" for i in range(1, 5))]


def test_tokens_that_did_not_have_to_be_read_do_not_count():
    line = line_of(*(a_sample(f"{tenant}{i}", tenant, 10) for tenant in "ab" for i in range(40)))
    served = Counter[str]()
    for _ in range(44):
        tenant = begin(line).tenant
        line.charge(tenant, -9 if tenant == "b" else 0)
        served[tenant] += 1
    assert served == {"a": 4, "b": 40}


def test_a_tenant_that_asks_one_by_one_is_charged_for_what_runs_while_others_wait():
    line, served = line_of(*(a_sample(f"a{i}", "a", 10) for i in range(40))), Counter[str]()
    for number in range(36):
        if "b" not in line.tenants:
            sample = a_sample(f"b{number}", "b")
            line.add(sample, sample)
        tenant = begin(line).tenant
        line.charge(tenant, 49 if tenant == "b" else 0)  # b waits for nothing meanwhile
        served[tenant] += 1
    assert served == {"a": 30, "b": 6}
