"""Order of turns, simulated: tenants with weights, models that come and go, turns of any cost, with and without
companions. The oracle adds up what each tenant was given.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from skyrl.backends.executor.fair_scheduler import FairScheduler

TENANTS = "abcd"
NUMBERS = "012345"
LARGEST = 100
WEIGHTS = (0.25, 0.5, 1, 2, 4)


@dataclass
class Simulation:
    """Models with work left, served turn by turn."""

    weights: dict[str, float]
    most: int = 1
    """Models in one turn."""
    queues: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    """(cost, kind) of what each model wants, in its order."""
    given: Counter[str] = field(default_factory=Counter)
    """Tokens of each tenant."""
    largest: Counter[str] = field(default_factory=Counter)
    order: list[list[str]] = field(default_factory=list)
    """The models of each turn, its leader first."""

    def __post_init__(self):
        self.turns = FairScheduler(self.weights)

    def ask(self, model: str, cost: int, kind: str = "x") -> None:
        """A model's first letter is its tenant."""
        self.queues[model].append((cost, kind))
        self.turns.place(model, model[0])

    def serve(self) -> list[str]:
        """One turn, as the executor has it."""
        order = self.turns.order()
        together: list[str] = []
        for model in order:
            cost, kind = self.queues[model][0]
            if together and not (kind == self.queues[together[0]][0][1] and self.turns.may_join(model, cost)):
                continue
            together.append(model)
            self.turns.charge(model, cost)
            self.given[model[0]] += cost
            self.largest[model[0]] = max(self.largest[model[0]], cost)
            if len(together) == self.most:
                break
        for model in together:
            self.queues[model].pop(0)
            if not self.queues[model]:
                del self.queues[model]
                self.turns.remove(model)
        assert 1 <= len(together) <= self.most
        self.order.append(together)
        return together

    @property
    def waiting(self) -> set[str]:
        return {model[0] for model in self.queues}

    def share(self, tenant: str) -> float:
        return self.given[tenant] / self.weights.get(tenant, 1)

    def may_be_ahead(self, tenant: str) -> float:
        """By how much its share may be larger than another's, with a rounding error."""
        return (1 if self.most == 1 else 2) * self.largest[tenant] / self.weights.get(tenant, 1) + 0.01


weights = st.fixed_dictionaries({tenant: st.sampled_from(WEIGHTS) for tenant in TENANTS})
most = st.sampled_from([1, 2, 4, 16])
models = st.builds(lambda tenant, number: f"{tenant}{number}", st.sampled_from(TENANTS), st.sampled_from(NUMBERS))
requests = st.lists(st.tuples(models, st.integers(1, LARGEST), st.sampled_from("xxy")), min_size=1, max_size=80)
arrivals = st.lists(st.one_of(st.none(), st.tuples(models, st.integers(1, LARGEST), st.sampled_from("xxy"))))
"""Requests, with a turn wherever there is None."""


@given(weights, most, requests)
def test_tenants_that_wait_together_are_given_their_shares(weights, most, requests):
    """i is ahead of j by Q_i / w_i at most, or by 2 Q_i / w_i where models are served together."""
    simulation = Simulation(weights, most)
    for request in requests:
        simulation.ask(*request)
    while simulation.waiting:
        simulation.serve()
        for one, other in combinations(sorted(simulation.waiting), 2):
            for ahead, behind in [(one, other), (other, one)]:
                assert simulation.share(ahead) - simulation.share(behind) <= simulation.may_be_ahead(ahead)


@given(weights, most, arrivals, st.data())
def test_two_tenants_that_both_wait_for_a_while_are_given_their_shares_in_that_while(weights, most, arrivals, data):
    """Gains differ by the bounds of both at most, whatever was before, and whoever else comes and goes."""
    simulation = Simulation(weights, most)
    one, other = data.draw(st.permutations(TENANTS))[:2]
    start: dict[str, float] | None = None
    for event in arrivals:
        if event is not None:
            simulation.ask(*event)
        elif simulation.waiting:
            simulation.serve()
        if not {one, other} <= simulation.waiting:
            start = None
            continue
        if start is None:
            start = {tenant: simulation.share(tenant) for tenant in (one, other)}
        gains = {tenant: simulation.share(tenant) - start[tenant] for tenant in (one, other)}
        bound = sum(2 * LARGEST / weights[tenant] if most > 1 else LARGEST / weights[tenant] for tenant in (one, other))
        assert abs(gains[one] - gains[other]) <= bound + 0.01


@given(weights, most, arrivals)
def test_everything_is_served_once_and_every_models_requests_in_their_order(weights, most, arrivals):
    simulation, asked, done = Simulation(weights, most), defaultdict(list), defaultdict(list)

    def serve() -> None:
        before = {model: list(queue) for model, queue in simulation.queues.items()}
        for model in simulation.serve():
            done[model].append(before[model][0])

    for event in arrivals:
        if event is not None:
            simulation.ask(*event)
            asked[event[0]].append(event[1:])
        elif simulation.waiting:
            serve()
    while simulation.waiting:
        serve()
    assert done == asked and not len(simulation.turns)


@given(weights, most, arrivals)
def test_names_decide_nothing(weights, most, arrivals):
    def grouped(names: dict[str, str]) -> list[list[str]]:
        simulation = Simulation({names[tenant]: weight for tenant, weight in weights.items()}, most)
        for event in arrivals:
            if event is not None:
                model, *rest = event
                simulation.ask(names[model[0]] + names[model[1:]], *rest)
            elif simulation.waiting:
                simulation.serve()
        return simulation.order

    own = {name: name for name in TENANTS + NUMBERS}
    others = dict(zip(TENANTS + NUMBERS, TENANTS[::-1] + NUMBERS[::-1], strict=True))
    assert [[others[m[0]] + others[m[1:]] for m in together] for together in grouped(own)] == grouped(others)


@given(weights, st.integers(1, 20), st.integers(1, LARGEST))
def test_who_begins_to_wait_has_its_turn_after_what_runs_and_one_turn_of_each_other_tenant(weights, busy, cost):
    simulation = Simulation(weights)
    for tenant in "bcd":
        for _ in range(busy + 20):
            simulation.ask(f"{tenant}0", LARGEST)
    for _ in range(busy):
        simulation.serve()
    simulation.ask("a0", cost)
    assert ["a0"] in [simulation.serve() for _ in range(3)]


@given(weights, most, arrivals, st.integers(1, LARGEST))
def test_who_runs_as_a_new_tenant_comes_has_no_other_turn_before_it(weights, most, arrivals, cost):
    """It may be computed with another in a turn of that. The history before does not matter."""
    simulation, running = Simulation(weights, most), set()
    for event in arrivals:
        if event is not None and event[0][0] != "a":
            simulation.ask(*event)
        elif simulation.waiting:
            running = {model[0] for model in simulation.serve()}
    simulation.ask("a0", cost)
    leaders = []
    while "a" in simulation.waiting:
        leaders.append(simulation.serve()[0][0])
    assert not running & set(leaders) and len(set(leaders)) == len(leaders)


@given(st.lists(st.integers(1, LARGEST)))
def test_who_asks_while_one_heavy_tenant_computes_is_next_every_time(costs):
    simulation = Simulation({})
    for _ in range(len(costs) + 1):
        simulation.ask("a0", LARGEST)
    for cost in costs:
        assert simulation.serve() == ["a0"]
        simulation.ask("b0", cost)
        assert simulation.serve() == ["b0"]


@given(weights, most, st.lists(st.one_of(st.none(), st.tuples(models, st.integers(1, LARGEST))), max_size=200))
def test_who_waits_all_the_time_is_not_overtaken_by_who_comes_and_goes(weights, most, arrivals):
    """Others may be ahead of it by no more than if they waited, too."""
    simulation = Simulation(weights, most)
    for _ in range(len(arrivals)):
        simulation.ask("a0", LARGEST)
    for event in arrivals:
        if event is not None and event[0][0] != "a":
            simulation.ask(*event)
        elif "a" in simulation.waiting:
            simulation.serve()
            for other in "bcd":
                assert simulation.share(other) - simulation.share("a") <= simulation.may_be_ahead(other)


def test_all_models_of_a_tenant_that_is_alone_are_served_together():
    simulation = Simulation({}, 16)
    for number in range(16):
        simulation.ask(f"a{number}", 10)
    assert len(simulation.serve()) == 16


def test_models_of_equal_tenants_that_want_the_same_are_served_together_every_time():
    simulation = Simulation({}, 4)
    for tenant in TENANTS:
        for _ in range(10):
            simulation.ask(f"{tenant}0", 10)
    while simulation.waiting:
        simulation.serve()
    assert all(len(together) == 4 for together in simulation.order)


def test_companions_are_charged():
    """Else the tenant that joins in each turn of another would have its own turns on top."""
    simulation = Simulation({}, 2)
    for model, kinds in [("a0", "xxxx"), ("b0", "xxxx"), ("c0", "yyyy")]:
        for kind in kinds:
            simulation.ask(model, 10, kind)
    assert [simulation.serve() for _ in range(4)] == [["a0", "b0"], ["c0"], ["a0", "b0"], ["c0"]]


def test_the_models_of_a_tenant_take_turns():
    simulation = Simulation({})
    for model in ["a0", "a1", "a2"]:
        for _ in range(3):
            simulation.ask(model, 10)
    order = [simulation.serve()[0] for _ in range(9)]
    assert order == ["a0", "a1", "a2"] * 3


def test_a_model_whose_next_operation_is_anothers_moves_to_their_line():
    turns = FairScheduler()
    turns.place("m", "a")
    turns.place("n", "a")
    turns.charge("m", 10)
    turns.place("m", "b")
    assert list(turns.order()) == ["n", "m"]
    turns.charge("m", 10)
    turns.remove("n")
    assert list(turns.order()) == ["m"] and len(turns) == 1


def test_a_tenants_own_requests_wait_for_no_more_than_one_turn_of_each_of_its_models():
    simulation = Simulation({})
    for number in range(5):
        for _ in range(20):
            simulation.ask(f"a{number}", 10)
    simulation.ask("a9", 10)
    order = [simulation.serve()[0] for _ in range(6)]
    assert "a9" in order and all(one != other for one, other in pairwise(order))


def test_a_model_that_comes_while_another_of_its_tenant_computes_is_next():
    simulation = Simulation({})
    for _ in range(5):
        simulation.ask("a0", LARGEST)
    simulation.serve()
    simulation.ask("a1", 1)
    assert [simulation.serve() for _ in range(2)] == [["a1"], ["a0"]]
