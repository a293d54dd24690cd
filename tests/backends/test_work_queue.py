"""Quanta of several models in one call, with scripted operations: each is a list of what it wants and does."""

from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl.backends.executor.work_queue import (
    AHEAD,
    BEGUN_EARLY,
    WAITING_AT_ONCE,
    Ended,
    Quantum,
    Work,
    WorkQueue,
)
from skyrl.backends.operations import ForwardBackward, ModelOperation, OptimStep
from skyrl.errors import BackendLost
from skyrl.types import AdamParams, Datum, ModelOutput
from tests.backends.clock import Clock

SCRIPT = "xx"
"""Unless it is said otherwise, two quanta of kind x."""


@dataclass
class Scripted:
    """Computes what scripts ask for: a letter is a quantum of that kind, "." a turn of its own, "!" a failure,
    "w" waiting until something has arrived (`arrive`).

    The answer to a quantum is its inputs: (request id, number). Quanta of kind "b" cannot be computed at all, those of
    kind "t" not together. `said` is all that happens, in order; `closed`: whose generators were closed too early.
    """

    most: int = 4
    in_flight: int = 1
    deadline_s: float | None = None
    in_place: bool = False
    dispatch_tokens: int = 0
    scripts: dict[str, str] = field(default_factory=dict)
    """By request id."""
    answers: dict[str, list[Any]] = field(default_factory=dict)
    said: list[Any] = field(default_factory=list)
    cost: int = 10
    waits: dict[str, Future[None]] = field(default_factory=dict)
    """By request id."""
    closed: list[str] = field(default_factory=list)
    surcharges: dict[tuple[str, int], int] = field(default_factory=dict)
    """By request id and number."""

    def hang(self) -> str:
        return ""

    def begin(self, operation: ModelOperation) -> Work:
        self.said.append(f"begin {operation.request_id}")
        return self._work(operation.request_id)

    def _work(self, name: str) -> Work:
        try:
            for number, letter in enumerate(self.scripts.get(name, SCRIPT)):
                if letter == "!":
                    raise ValueError(name)
                if letter in ".w":
                    yield None if letter == "." else self.waits.setdefault(name, Future())
                    continue
                kind = None if letter == "-" else letter
                quantum = Quantum(self.cost, kind, (name, number), self.surcharges.get((name, number), 0))
                self.answers.setdefault(name, []).append((yield quantum))
        except GeneratorExit:
            self.closed.append(name)
            raise
        return ModelOutput(name)

    def arrive(self, *names: str) -> None:
        """End what these wait for now."""
        for name in names:
            self.waits.pop(name).set_result(None)

    def may_wait(self, operation: ModelOperation) -> bool:
        return self.scripts.get(operation.request_id, SCRIPT).startswith("w")

    def compute(self, quanta: list[Quantum]) -> "list[Any] | Future[list[Any]]":
        self.said.append([name for name, _ in (quantum.inputs for quantum in quanta)])
        if any(quantum.kind == "b" or (quantum.kind == "t" and len(quanta) > 1) for quantum in quanta):
            raise ValueError("cannot compute this")
        return [quantum.inputs for quantum in quanta]

    def most_together(self, kind: Hashable) -> int:
        return self.most

    def on_quantum(self, request_ids: tuple[str, ...]) -> None:
        self.said.append(request_ids)

    def on_answer(self, answers: "Future[list[Any]]") -> None:
        """Nobody sleeps here."""

    @property
    def calls(self) -> list[list[str]]:
        return [event for event in self.said if isinstance(event, list)]


def a_pass(name: str, tokens: int = 20, **options: Any) -> ForwardBackward:
    """Of the model that its name begins with, which is its own tenant."""
    data = [Datum(np.zeros(tokens, np.int32), {})]
    model = {"model_id": name[0], "tenant": name[0]}
    return ForwardBackward(request_id=name, data=data, loss_fn="cross_entropy", **{**model, **options})


def a_step(name: str) -> OptimStep:
    return OptimStep(request_id=name, model_id=name[0], tenant=name[0], adam_params=AdamParams())


def done(computer: Scripted, *operations: ModelOperation) -> dict[str, Any]:
    """Outcomes by request, in the order in which they came."""
    quanta = WorkQueue(computer)
    for operation in operations:
        quanta.add(operation)
    ended: list[Ended] = []
    while quanta:
        ended += quanta.turn()
        computer.arrive(*computer.waits)
    return {one.operation.request_id: one.outcome for one in ended}


def test_quanta_of_one_kind_are_computed_together_and_each_operation_gets_its_own_answers():
    computer = Scripted()
    outcomes = done(computer, a_pass("a"), a_pass("b"), a_pass("c"))
    assert computer.calls == [["a", "b", "c"]] * 2
    assert computer.answers == {name: [(name, 0), (name, 1)] for name in "abc"}
    assert outcomes == {name: ModelOutput(name) for name in "abc"}


def test_quanta_of_other_kinds_or_of_none_are_computed_alone():
    computer = Scripted(scripts={"a": "x", "b": "y", "c": "-", "d": "-"})
    done(computer, *map(a_pass, "abcd"))
    assert computer.calls == [["a"], ["b"], ["c"], ["d"]]


def test_only_passes_are_begun_before_their_turn():
    computer = Scripted(scripts={"b": "x"})
    done(computer, a_pass("a"), a_step("b"))
    assert computer.calls == [["a"], ["b", "a"]]


def test_a_large_pass_is_begun_in_its_own_turn():
    computer = Scripted()
    done(computer, a_pass("a"), a_pass("b", tokens=BEGUN_EARLY + 1), a_pass("c"))
    assert computer.calls[0] == ["a", "c"] and computer.calls[1] == ["b", "a", "c"]


def test_what_is_begun_early_in_one_turn_is_bounded():
    computer = Scripted(most=8)
    done(computer, *(a_pass(name, tokens=BEGUN_EARLY // 2) for name in "abcdef"))
    begun = computer.said[: computer.said.index(computer.calls[0])]
    assert [event for event in begun if isinstance(event, str)] == ["begin a", "begin b", "begin c"]


def test_a_step_that_has_begun_joins_too():
    computer = Scripted(scripts={"a": "xxx", "b": "xxx"})
    done(computer, a_step("a"), a_step("b"))
    assert computer.calls == [["a"], ["b", "a"], ["b", "a"], ["b"]]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_work_that_ends_without_a_result_fails():
    class Forgetful(Scripted):
        def _work(self, name: str) -> Work:
            yield from super()._work(name)
            return None  # pyright: ignore[reportReturnType]

    assert isinstance(done(Forgetful(), a_pass("a"))["a"], TypeError)


def test_a_quantum_that_costs_nothing_fails_its_operation():
    assert isinstance(done(Scripted(cost=0), a_pass("a"))["a"], AssertionError)


# -- suspects ----------------------------------------------------------------------------------------------------------


def test_a_suspect_is_not_begun_before_its_turn():
    computer = Scripted()
    done(computer, a_pass("a"), a_pass("b", alone=True))
    assert computer.said.index("begin b") > computer.said.index(["a"])


def test_everything_is_told_before_it_is_done_with_all_that_it_is_done_for():
    computer = Scripted(scripts={"a": ".x", "b": "x"})
    done(computer, a_pass("a"), a_pass("b"))
    assert computer.said == [
        *[("a",), "begin a"],
        *[("b",), "begin b", ["b"]],
        *[("a",), ["a"]],
    ]
    computer = Scripted(scripts=dict.fromkeys("abc", "x"))
    done(computer, *map(a_pass, "abc"))
    assert computer.said == [
        *[("a",), "begin a", ("b",), "begin b", ("c",), "begin c"],
        *[("a", "b", "c"), ["a", "b", "c"]],
    ]


# -- turns -------------------------------------------------------------------------------------------------------------


def test_a_turn_that_an_operation_takes_by_itself_is_a_turn():
    computer = Scripted(scripts={"a": "...", "b": "..."})
    quanta = WorkQueue(computer)
    for name in "ab":
        quanta.add(a_step(name))
    told = []
    while quanta:
        quanta.turn()
        told += [event for event in computer.said if isinstance(event, tuple)]
        computer.said.clear()
    assert told == [("a",), ("b",)] * 4


def test_a_background_write_ends_an_operation_with_its_future():
    class Writing(Scripted):
        def _work(self, name: str) -> Work:
            yield from super()._work(name)
            return Future()

    assert isinstance(done(Writing(), a_pass("a"))["a"], Future)


def test_abandoned_operations_are_closed_and_leave_nothing_behind():
    computer = Scripted(scripts={"c1": "w"})
    quanta = WorkQueue(computer)
    operations = [a_step("c1"), a_pass("a1"), a_pass("a2"), a_pass("b1"), a_pass("d1", alone=True)]
    for operation in operations:
        quanta.add(operation)
    quanta.turn()
    assert sorted(quanta.abandon(), key=operations.index) == operations and not quanta and not quanta.has_begun("a")
    assert sorted(computer.closed) == ["a1", "b1", "c1"]
    computer.said.clear()
    computer.arrive(*computer.waits)
    quanta.add(a_pass("a3"))
    while quanta:
        quanta.turn()
    assert computer.calls == [["a3"]] * 2


# -- waiting -----------------------------------------------------------------------------------------------------------


def turns(quanta: WorkQueue, number: int) -> None:
    for _ in range(number):
        quanta.turn()


def test_what_waits_takes_no_turn_and_has_its_own_as_soon_as_that_is_over():
    computer = Scripted(most=1, scripts={"a": "wx", "b": "x" * 100})
    quanta = WorkQueue(computer)
    for name in "ab":
        quanta.add(a_pass(name))
    turns(quanta, 50)
    assert computer.calls == [["b"]] * 50
    computer.arrive("a")
    turns(quanta, 2)
    assert computer.calls[50:] == [["a"], ["b"]]


def test_each_that_waits_is_told_of_when_it_begins_and_when_it_goes_on():
    computer = Scripted(scripts={"a": "w", "b": "w"})
    quanta = WorkQueue(computer)
    for name in "ab":
        quanta.add(a_step(name))
    turns(quanta, 3)
    assert computer.said == [("a",), "begin a", ("b",), "begin b"]
    computer.arrive("b")
    assert [ended.operation.request_id for ended in quanta.turn()] == ["b"]
    assert computer.said[4:] == [("b",)]


def test_it_is_known_when_all_that_is_there_waits():
    computer = Scripted(scripts={"a": "w", "b": "xx"})
    quanta = WorkQueue(computer)
    for name in "ab":
        quanta.add(a_pass(name))
    assert names(turn_while_ready(quanta)) == ["b"] and quanta.has_begun("a")
    quanta.turn()
    assert not quanta.ready
    computer.arrive("a")
    assert names(turn_while_ready(quanta)) == ["a"]


def test_a_tenant_with_many_models_that_have_to_wait_does_not_stand_in_line_with_all_of_them():
    computer = Scripted(scripts=dict.fromkeys("abcdez", "w") | {"r": "x"})
    quanta = WorkQueue(computer)
    for name in "abcde":
        quanta.add(a_pass(name, tenant="many"))
    quanta.add(a_pass("r", tenant="many"))
    quanta.add(a_pass("z"))
    turns(quanta, 3)
    begun = [event.removeprefix("begin ") for event in computer.said if isinstance(event, str)]
    assert sorted(begun) == ["a", "b", "r", "z"] and WAITING_AT_ONCE == 2
    computer.arrive("a", "b")
    for _ in range(20):
        quanta.turn()
        computer.arrive(*set("abcde").intersection(computer.waits))
    assert [name for name in "abcde" if not quanta.has_begun(name)] == list("abcde") and quanta.has_begun("z")


def test_what_has_to_wait_is_not_begun_before_its_turn():
    computer = Scripted(scripts={"a": "x", "b": "wx", "c": "x"})
    quanta = WorkQueue(computer)
    for name in "abc":
        quanta.add(a_pass(name))
    quanta.turn()
    assert computer.calls == [["a", "c"]] and not quanta.has_begun("b")


def test_who_has_something_compiled_waits_for_as_long_as_others_need_to_have_as_much():
    computer = Scripted(most=1, scripts=dict.fromkeys("ab", "x" * 12), surcharges={("a", 0): 90})
    quanta = WorkQueue(computer)
    for name in "ab":
        quanta.add(a_pass(name))
    for _ in range(12):
        quanta.turn()
    assert computer.calls == [["a"], *[["b"]] * 10, ["a"]]
    assert quanta.statistics["train_computed_tokens"] == 120


def test_an_operation_has_its_turns_in_the_line_of_its_own_tenant():
    computer = Scripted(most=1, scripts={"a1": "x", "a2": "xxx", "b": "x" * 20, "c": "xxx"})
    tenants = {"a1": "one", "a2": "other", "b": "other", "c": "one"}
    done(computer, *(a_pass(name, tenant=tenant) for name, tenant in tenants.items()))
    last = max(number for number, call in enumerate(computer.calls) if call == ["c"])
    shares = [sum(tenants[name] == tenant for (name,) in computer.calls[: last + 1]) for tenant in ("one", "other")]
    assert abs(shares[0] - shares[1]) <= 1


# -- computed elsewhere ------------------------------------------------------------------------------------------------


@dataclass
class Elsewhere(Scripted):
    """Computes nothing by itself: each dispatch is in `dispatched` until the test answers it."""

    dispatched: list[tuple[list[Quantum], Future[list[Any]]]] = field(default_factory=list)

    def compute(self, quanta: list[Quantum]) -> "Future[list[Any]]":
        super().compute(quanta)
        self.dispatched.append((quanta, Future()))
        return self.dispatched[-1][1]

    def answer(self, number: int = 0) -> None:
        quanta, answers = self.dispatched.pop(number)
        answers.set_result([quantum.inputs for quantum in quanta])


def turned(
    computer: Scripted, *operations: ModelOperation, clock: Clock | None = None
) -> tuple[WorkQueue, list[Ended]]:
    """After as many turns as it has something to do for."""
    quanta = WorkQueue(computer, clock=clock or Clock())
    for operation in operations:
        quanta.add(operation)
    return quanta, turn_while_ready(quanta)


def turn_while_ready(quanta: WorkQueue) -> list[Ended]:
    ended = []
    while quanta.ready:
        ended += quanta.turn()
    return ended


def names(ended: list[Ended]) -> list[str]:
    return [one.operation.request_id for one in ended]


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_no_more_dispatches_are_in_flight_than_may_be(in_flight):
    computer = Elsewhere(most=1, in_flight=in_flight, scripts=dict.fromkeys("abcde", "x"))
    quanta, _ = turned(computer, *map(a_pass, "abcde"))
    assert len(computer.dispatched) == in_flight and not quanta.ready
    computer.answer()
    assert names(turn_while_ready(quanta)) == ["a"] and len(computer.dispatched) == in_flight


def test_what_computes_nothing_begins_and_ends_while_a_dispatch_is_in_flight():
    computer = Elsewhere(scripts={"a": "x", "b": "."})
    quanta, ended = turned(computer, a_pass("a"), a_step("b"))
    assert names(ended) == ["b"] and quanta.computed == ("a",)


def test_quanta_of_the_next_dispatch_are_made_while_one_is_in_flight_but_not_of_all_that_wait():
    computer = Elsewhere(most=1, scripts=dict.fromkeys("abcdefghij", "x"))
    quanta, _ = turned(computer, *map(a_pass, "abcdefghij"))
    assert sum(quanta.has_begun(name) for name in "abcdefghij") == 1 + AHEAD and len(computer.dispatched) == 1


def test_a_model_has_one_operation_under_way_at_a_time():
    computer = Elsewhere(in_flight=4, scripts={"a1": "x", "a2": "x"})
    quanta, _ = turned(computer, a_pass("a1"), a_pass("a2"))
    assert computer.calls == [["a1"]]
    computer.answer()
    turn_while_ready(quanta)
    assert computer.calls == [["a1"], ["a2"]]


def test_tenants_are_charged_when_theirs_is_dispatched():
    computer = Elsewhere(most=1, in_flight=1, scripts=dict.fromkeys(["a1", "a2", "b1", "b2"], "x"))
    many = [a_pass(name, model_id=name, tenant=name[0]) for name in ("a1", "a2", "b1", "b2")]
    quanta, _ = turned(computer, *many)
    while computer.dispatched:
        computer.answer()
        turn_while_ready(quanta)
    assert [name[0] for (name,) in computer.calls] == ["a", "b", "a", "b"]


def test_all_that_is_computed_is_told_of_with_what_is_in_flight():
    computer = Elsewhere(most=1, in_flight=2, scripts=dict.fromkeys("ab", "x"))
    turned(computer, a_pass("a"), a_pass("b"))
    assert [event for event in computer.said if isinstance(event, tuple)][-1] == ("b", "a")


def test_what_cannot_be_computed_together_elsewhere_is_computed_alone():
    computer = Elsewhere(scripts=dict.fromkeys("ab", "x"))
    quanta, _ = turned(computer, a_pass("a"), a_pass("b"))
    computer.dispatched.pop()[1].set_exception(ValueError("not together"))
    turn_while_ready(quanta)
    assert computer.calls == [["a", "b"], ["a"]]
    computer.dispatched.pop()[1].set_exception(ValueError("nor alone"))
    (ended,) = turn_while_ready(quanta)
    assert ended.operation.request_id == "a" and str(ended.outcome) == "nor alone"
    computer.answer()
    assert names(turn_while_ready(quanta)) == ["b"] and not quanta


def test_a_dispatch_that_fails_in_place_is_not_tried_again():
    computer = Elsewhere(in_place=True, scripts=dict.fromkeys("ab", "x"))
    quanta, _ = turned(computer, a_pass("a"), a_pass("b"))
    computer.dispatched.pop()[1].set_exception(ValueError("half of it is done"))
    assert [str(ended.outcome) for ended in turn_while_ready(quanta)] == ["half of it is done"] * 2
    assert computer.calls == [["a", "b"]]


def test_a_dispatch_that_is_late_loses_the_backend():
    computer, clock = Elsewhere(deadline_s=0.5), Clock()
    quanta, _ = turned(computer, a_pass("a"), clock=clock)
    assert quanta.time_left() == 0.5 and not quanta.ready
    clock.now += 0.5
    assert quanta.ready
    with pytest.raises(BackendLost, match=r"not ended within deadline_s=0\.5"):
        quanta.turn()


def test_the_deadline_of_a_dispatch_begins_when_the_one_before_it_has_ended():
    computer, clock = Elsewhere(most=1, in_flight=2, deadline_s=2, scripts=dict.fromkeys("ab", "x")), Clock()
    quanta, _ = turned(computer, a_pass("a"), a_pass("b"), clock=clock)
    clock.now += 1
    assert quanta.time_left() == 1
    computer.answer()
    turn_while_ready(quanta)
    assert quanta.time_left() == 2


def test_what_no_operation_is_to_blame_for_is_raised():
    computer = Elsewhere()
    quanta, _ = turned(computer, a_pass("a"))
    computer.dispatched.pop()[1].set_exception(BackendLost("rank 3 is dead"))
    with pytest.raises(BackendLost, match="rank 3"):
        quanta.turn()


def test_answers_to_what_was_abandoned_are_not_looked_at():
    computer = Elsewhere(scripts={"a": "x", "b": "x"})
    quanta, _ = turned(computer, a_pass("a"))
    assert names([Ended(operation, None) for operation in quanta.abandon()]) == ["a"]  # pyright: ignore
    quanta.add(a_pass("b"))
    turn_while_ready(quanta)
    computer.answer()
    assert turn_while_ready(quanta) == []
    computer.answer()
    assert names(turn_while_ready(quanta)) == ["b"]


# -- several quanta at once --------------------------------------------------------------------------------------------


class Several(Scripted):
    """Asks for all quanta of its script at once."""

    def _work(self, name: str) -> Work:
        quanta = [Quantum(self.cost, kind, (name, n)) for n, kind in enumerate(self.scripts.get(name, SCRIPT))]
        self.answers[name] = yield quanta
        return ModelOutput(name)


def test_several_quanta_of_one_model_share_a_dispatch_and_come_back_in_order():
    computer = Several(scripts={"a": "x" * 6})
    assert done(computer, a_pass("a")) == {"a": ModelOutput("a")}
    assert computer.calls == [["a"] * 4, ["a"] * 2] and computer.answers["a"] == [("a", n) for n in range(6)]


def test_each_model_has_a_place_before_another_has_a_second():
    computer = Several(scripts=dict.fromkeys("abc", "x" * 3))
    done(computer, *map(a_pass, "abc"))
    assert [sorted(call) for call in computer.calls] == [list("aabc"), list("abbc"), ["c"]]


@pytest.mark.parametrize(
    ("tokens", "sizes"), [(0, [2, 2, 2, 1]), (10, [2, 2, 2, 1]), (11, [4, 3]), (20, [4, 3]), (21, [6, 1]), (99, [7])]
)
def test_a_dispatch_with_few_tokens_gets_more_quanta_in_full_rounds(tokens, sizes):
    computer = Several(scripts={"a": "x" * 7}, most=2, cost=5, dispatch_tokens=tokens)
    assert done(computer, a_pass("a")) == {"a": ModelOutput("a")}
    assert [len(call) for call in computer.calls] == sizes


def test_further_quanta_of_a_dispatch_are_shared_by_its_models():
    computer = Several(scripts=dict.fromkeys("ab", "x" * 4), most=2, cost=5, dispatch_tokens=20)
    done(computer, a_pass("a"), a_pass("b"))
    assert computer.calls == [["a", "b"] * 2] * 2


def test_quanta_of_other_kinds_wait_for_a_dispatch_of_their_own():
    computer = Several(scripts={"a": "xxy"})
    done(computer, a_pass("a"))
    assert computer.calls == [["a", "a"], ["a"]]


def test_an_operation_with_a_quantum_that_cannot_be_computed_fails_when_the_others_are_back():
    computer = Several(most=1, scripts={"a": "xbx", "c": "x"})
    outcomes = done(computer, a_pass("a"), a_pass("c"))
    assert isinstance(outcomes["a"], ValueError) and outcomes["c"] == ModelOutput("c")
    assert computer.calls.count(["a"]) == 2


scripts = st.text("xxxyt-.b!w", max_size=6)
operations = st.lists(st.tuples(st.sampled_from("abcde"), scripts, st.booleans(), st.booleans()), max_size=25)


@given(operations, st.integers(1, 6))
def test_any_mixture_ends_as_each_operation_does_alone_and_models_keep_their_order(given_operations, most):
    computer, asked = Scripted(most), []
    for number, (model, script, is_pass, alone) in enumerate(given_operations):
        name = f"{model}{number}"
        computer.scripts[name] = script
        asked.append(a_pass(name, alone=alone) if is_pass else a_step(name))
    outcomes = done(computer, *asked)
    for model in "abcde":
        own = [operation.request_id for operation in asked if operation.model_id == model]
        assert [name for name in outcomes if name[0] == model] == own
    for operation in asked:
        alone = Scripted(most, scripts={operation.request_id: computer.scripts[operation.request_id]})
        (outcome,) = done(alone, operation).values()
        assert repr(outcomes[operation.request_id]) == repr(outcome)
        assert computer.answers.get(operation.request_id) == alone.answers.get(operation.request_id)
    for call in computer.calls:
        assert len(call) <= most and len({name[0] for name in call}) == len(call)
        assert len(call) == 1 or not any(operation.alone for operation in asked if operation.request_id in call)


@given(operations, st.integers(1, 6), st.integers(1, 3), st.randoms(use_true_random=False))
def test_any_mixture_that_is_computed_elsewhere_ends_as_if_it_were_computed_at_once(
    given_ones, most, in_flight, chance
):
    computer, asked = Elsewhere(most, in_flight), []
    for number, (model, script, is_pass, alone) in enumerate(given_ones):
        name = f"{model}{number}"
        computer.scripts[name] = script
        asked.append(a_pass(name, alone=alone) if is_pass else a_step(name))
    quanta, ended = turned(computer, *asked)
    while quanta:
        computer.arrive(*computer.waits)
        if computer.dispatched:
            computer.answer(chance.randrange(len(computer.dispatched)))
        ended += turn_while_ready(quanta)
    at_once = Scripted(most, scripts=computer.scripts)
    expected = done(at_once, *asked)
    assert {one.operation.request_id: repr(one.outcome) for one in ended} == {
        name: repr(outcome) for name, outcome in expected.items()
    }
    assert computer.answers == at_once.answers
