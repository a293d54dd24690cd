"""The router as pure state: who begins where, and who waits for whom."""

import random
from collections import Counter, deque

import numpy as np
import pytest

from skyrl.backends.engines.recent_prompts import RecentPrompts
from skyrl.backends.engines.router import Load, Router, Start, Ticket
from tests.backends.engines.marked import ticket

ANY = frozenset[str]()


def router_of(*engines: str, max_requests: int = 4, max_loras: int = 2, **options) -> Router:
    router = Router()
    for name in engines:
        join(router, name, max_requests=max_requests, max_loras=max_loras, **options)
    return router


def join(router: Router, name: str, **options) -> None:
    router.join(name, **{"max_requests": 4, "max_loras": 2, "longest": 100, "features": ANY, "adapters": []} | options)


def started(moves: list[Start | Load]) -> list[tuple[str, str]]:
    return [(move.ticket.request.request_id, move.engine) for move in moves if isinstance(move, Start)]


def loads(moves: list[Start | Load]) -> list[tuple[str, str, str | None]]:
    return [(move.engine, move.adapter, move.instead_of) for move in moves if isinstance(move, Load)]


def test_samples_that_are_alike_go_to_one_engine_while_it_has_no_more_to_do_than_others():
    router = router_of("a", "b", "c", max_requests=100)
    for number in range(12):
        router.add(ticket(str(number), key="one conversation", prompt=(number,)))
    assert len({engine for _, engine in started(router.moves())}) == 1


def conversations(count: int, turns: int, system: tuple[int, ...]) -> tuple[float, Counter[str]]:
    """Shuffled turns of conversations that share a system prompt, on four engines: the share of turns that went to the
    engine of the turn before, and the turns of each engine.
    """
    chance, router = random.Random(0), router_of("a", "b", "c", "d", max_requests=32, longest=1000)
    prompts: dict[int, tuple[int, ...]] = {number: (*system, number) for number in range(count)}
    places: dict[int, str] = {}
    same, load, running = 0, Counter[str](), []
    order = [number for number in range(count) for _ in range(turns)]
    chance.shuffle(order)
    for turn, number in enumerate(order):
        router.add(ticket(str(turn), prompt=prompts[number]))
        prompts[number] = (*prompts[number], *(chance.randrange(100) for _ in range(chance.randrange(1, 9))))
        for move in router.moves():
            assert isinstance(move, Start)
            same += places.get(number) == move.engine
            places[number] = move.engine
            load[move.engine] += 1
            running.append(move.ticket)
        if len(running) > 24:
            router.ended(running.pop(chance.randrange(len(running))), 1, 0)
    return same / (len(order) - count), load


@pytest.mark.parametrize("system", [(), tuple(range(64))], ids=["no system prompt", "shared system prompt"])
def test_turns_of_a_conversation_go_to_one_engine_and_conversations_to_all(system):
    same, load = conversations(64, 20, system)
    assert same > 0.95
    assert len(load) == 4 and max(load.values()) < 1.5 * min(load.values())


def test_recent_prompts_are_forgotten_in_order_of_their_use():
    recent, prompt = RecentPrompts(most=2), np.arange(9, dtype=np.int32)
    one, two, three = (recent.hashes(b"", prompt[:length]) for length in (3, 5, 7))
    recent.record(one, None, "a")
    recent.record(two, None, "b")
    assert recent.begin_of(one) == one[-1] and recent.begin_of(three) == two[-1]
    recent.record(three[:-1], recent.begin_of(one), "c")
    assert recent.begin_of(two) == one[-1] and recent.engine(int(one[-1])) == "c"
    assert recent.begin_of(recent.hashes(b"another tenant", prompt)) is None


def test_a_busy_engine_does_not_keep_what_is_alike():
    router = router_of("a", "b", max_requests=10)
    for number in range(10):
        router.add(ticket(str(number)))
    counts = Counter(engine for _, engine in started(router.moves()))
    assert sorted(counts.values()) == [4, 6]


def test_an_adapter_is_loaded_once_for_all_that_wait_for_it():
    router = router_of("a", "b")
    for number in range(5):
        router.add(ticket(str(number), "x"))
    (load,) = router.moves()
    assert isinstance(load, Load) and load.instead_of is None
    assert not router.moves()
    router.loaded(load.engine, "x", True)
    assert {engine for _, engine in started(router.moves())} == {load.engine}


def test_what_an_engine_was_lost_with_is_drawn_there_again_beside_steady_others():
    router = router_of("a", adapters=["x", "y"])
    before, lost = ticket("before", "y", tenant="steady"), ticket("lost", "x", tenant="lone")
    router.add(before)
    router.add(lost)
    assert len(started(router.moves())) == 2
    for each in router.leave("a"):
        each.avoid.add("a")
    join(router, "a", max_requests=2, max_loras=1, adapters=["y"])  # and has fewer slots
    running = deque[Ticket]()
    for number in range(100):
        router.add(ticket(f"steady {number}", "y", tenant="steady"))
        for move in router.moves():
            if isinstance(move, Load):
                router.loaded(move.engine, move.adapter, True)
            elif move.ticket is lost:
                return
            else:
                running.append(move.ticket)
        if running:
            router.ended(running.popleft(), 1, 0)
    raise AssertionError("it still waits")


def test_the_least_recently_used_idle_adapter_makes_room():
    router = router_of("a", adapters=["old", "new"])
    used = ticket("1", "old")
    router.add(used)
    assert started(router.moves()) == [("1", "a")]
    router.ended(used, 2, 0)
    router.add(ticket("2", "third"))
    assert loads(router.moves()) == [("a", "third", "new")]


def test_an_adapter_that_is_sampled_is_never_unloaded():
    router = router_of("a", max_loras=1, adapters=["x"])
    router.add(ticket("1", "x"))
    router.moves()
    router.add(ticket("2", "y"))
    assert not router.moves()


def test_a_lone_tenants_adapter_waits_for_one_fill_of_the_engines_at_most():
    router = router_of("a", max_requests=4, max_loras=1, adapters=["crowd"])
    running: deque = deque()
    numbers = iter(range(10**6))

    def turn() -> list[Start | Load]:
        for _ in range(2):
            router.add(ticket(f"crowd {next(numbers)}", "crowd", tenant="crowd"))
        moves = router.moves()
        running.extend(move.ticket for move in moves if isinstance(move, Start))
        return moves

    turn()
    router.add(ticket("lone", "its own", tenant="lone"))
    begun = 0
    while running:
        router.ended(running.popleft(), 2, 0)
        if loads(moves := turn()):
            break
        begun += len(started(moves))
    assert begun <= 2 * 4
    router.loaded("a", "its own", True)
    assert started(router.moves())[0] == ("lone", "a")


def test_tenants_that_wait_for_slots_take_turns():
    """Two tenants with an adapter each share one slot: neither gets more than twice what the other has."""
    router = router_of("a", max_requests=2, max_loras=1)
    numbers, served, running = iter(range(10**6)), Counter(), deque()
    for _ in range(400):
        for tenant in ("one", "two"):
            while sum(t.request.tenant == tenant for t in router.waiting) < 6:
                router.add(ticket(f"{next(numbers)}", tenant, tenant=tenant))
        for move in router.moves():
            if isinstance(move, Load):
                router.loaded(move.engine, move.adapter, True)
            else:
                running.append(move.ticket)
                served[move.ticket.request.tenant] += 1
        if running:
            router.ended(running.popleft(), 2, 0)
    assert max(served.values()) <= 2 * min(served.values()), served


def test_samples_of_a_lost_engine_go_before_all_others():
    router = router_of("a", max_requests=2)
    for number in range(4):
        router.add(ticket(str(number)))
    router.moves()
    assert [lost.request.request_id for lost in router.leave("a")] == ["0", "1"]
    join(router, "b", max_requests=2)
    assert [name for name, _ in started(router.moves())] == ["0", "1"]


def test_what_an_engine_failed_at_goes_to_another_if_there_is_one():
    router = router_of("a", "b")
    failed = ticket("1")
    router.add(failed)
    ((_, engine),) = started(router.moves())
    failed.avoid.add(engine)
    router.again(failed)
    ((_, other),) = started(router.moves())
    assert other != engine
    router.leave(other)
    assert started(router.moves()) == [("1", engine)]


@pytest.mark.parametrize(("needs", "tokens"), [(frozenset(["adapter:unembed"]), 5), (ANY, 200)])
def test_samples_go_where_they_can_be_drawn(needs, tokens):
    router = router_of("small")
    sample = ticket("1", max_tokens=tokens)
    sample.needs = needs
    router.add(sample)
    assert not router.moves() and not router.servable(sample)
    join(router, "large", longest=1000, features=frozenset(["adapter:unembed"]))
    assert started(router.moves()) == [("1", "large")]


@pytest.mark.full
def test_random_histories_never_break_an_engine():
    """10^5 steps of arrivals, ends, loads, losses and returns. Engines hold what they say, and all is drawn once."""
    chance = random.Random(0)
    sizes = {"a": (3, 1), "b": (5, 2), "c": (2, 3)}
    router = Router()
    there: dict[str, set[str]] = {}  # adapters that each engine really has
    loading: list[Load] = []
    running: dict[str, list] = {}
    numbers, submitted, ended = iter(range(10**9)), 0, 0
    for _ in range(100_000):
        match chance.choices(["add", "end", "load", "leave", "join", "cancel"], [10, 12, 8, 0.2, 0.5, 0.5])[0]:
            case "add" if len(router) < 20:
                adapter = chance.choice([None, *(f"version {number}" for number in range(12))])
                router.add(ticket(str(next(numbers)), adapter, tenant=chance.choice("xyz")))
                submitted += 1
            case "end" if tickets := [ticket for some in running.values() for ticket in some]:
                done = chance.choice(tickets)
                next(some for some in running.values() if done in some).remove(done)
                router.ended(done, 2, 0)
                ended += 1
            case "load" if loading:
                load = loading.pop(chance.randrange(len(loading)))
                there[load.engine].add(load.adapter)
                router.loaded(load.engine, load.adapter, True)
            case "leave" if there:
                name = chance.choice(sorted(there))
                assert set(router.leave(name)) == set(running.pop(name))
                del there[name]
                loading = [load for load in loading if load.engine != name]
            case "join":
                name = chance.choice(sorted(sizes))
                if name not in there:
                    there[name], running[name] = set(), []
                    join(router, name, max_requests=sizes[name][0], max_loras=sizes[name][1])
            case "cancel" if router.waiting:
                router.remove(chance.choice(router.waiting))
                ended += 1
        for move in router.moves():
            if isinstance(move, Load):
                if move.instead_of is not None:
                    assert all(each.adapter != move.instead_of for each in running[move.engine])
                    there[move.engine].remove(move.instead_of)
                loading.append(move)
                held = there[move.engine] | {load.adapter for load in loading if load.engine == move.engine}
                assert len(held) <= sizes[move.engine][1]
            else:
                adapter = move.ticket.adapter
                assert adapter is None or adapter in there[move.engine]
                running[move.engine].append(move.ticket)
                assert len(running[move.engine]) <= sizes[move.engine][0]
    assert ended > 20_000
    assert submitted == ended + len(router) + sum(map(len, running.values()))
