"""Shares of the interpreter: who takes most of it waits while the event loop is behind, and nobody else does."""

import asyncio
import contextvars
import time

import pytest

from skyrl.tinker.wire.loop_time import AT_LEAST_EVERY_S, BEHIND_S, HALF_LIFE_S, LET_IN, LoopTime

LATE, IN_TIME = 2 * BEHIND_S, BEHIND_S / 2


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def asked(times: LoopTime, *senders: str) -> list[asyncio.Task]:
    tasks = [asyncio.create_task(times.turn(sender)) for sender in senders]
    await asyncio.sleep(0)
    return tasks


def at(function):
    """Run a test on a loop, with a clock that stands."""

    def test():
        clock = Clock()
        times = LoopTime(clock)
        times._watching = True  # it looks when the test says so
        asyncio.run(asyncio.wait_for(function(times, clock), 30))

    test.__name__ = function.__name__
    return test


async def begun(tasks: list[asyncio.Task]) -> list[bool]:
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return [task.done() for task in tasks]


@at
async def test_nobody_waits_while_the_loop_is_in_time(times, clock):
    times.charge("heavy", 9.0)
    times.look(IN_TIME)
    assert await begun(await asked(times, "heavy", "light")) == [True, True]


@at
async def test_who_has_taken_more_than_the_mean_waits_while_the_loop_is_behind(times, clock):
    times.charge("heavy", 1.0)
    times.charge("light", 0.1)
    times.look(LATE)
    tasks = await asked(times, "heavy", "light", "new")
    assert await begun(tasks) == [False, True, True]
    times.look(IN_TIME)
    assert await begun(tasks) == [True, True, True]


@at
async def test_a_sender_alone_never_waits(times, clock):
    times.charge("only", 5.0)
    times.look(LATE)
    assert await begun(await asked(times, *["only"] * 3)) == [True] * 3


@at
async def test_those_who_have_taken_least_are_let_in_first(times, clock):
    for sender, seconds in [("a", 9.0), ("b", 8.0), ("c", 1.0)]:
        times.charge(sender, seconds)
    times.look(LATE)
    a = await asked(times, *["a"] * LET_IN)
    b = await asked(times, "b")
    times.look(IN_TIME)
    assert (await begun(a), await begun(b)) == ([True] * (LET_IN - 1) + [False], [True])


@at
async def test_one_at_a_time_goes_on_although_the_loop_stays_behind(times, clock):
    times.charge("heavy", 9.0)
    times.charge("light", 0.1)
    times.look(LATE)
    tasks = await asked(times, "heavy", "heavy")
    clock.now += AT_LEAST_EVERY_S / 2
    times.look(LATE)
    assert await begun(tasks) == [False, False]
    clock.now += 0.6 * AT_LEAST_EVERY_S
    times.look(LATE)
    assert await begun(tasks) == [True, False]


@at
async def test_what_was_taken_is_forgotten_by_half_each_second(times, clock):
    times.charge("before", 1.0)
    clock.now += 2 * HALF_LIFE_S
    times.look(LATE)
    times.charge("now", 0.5)
    assert await begun(await asked(times, "before", "now")) == [True, False]


@at
async def test_a_request_whose_client_has_left_takes_nobodys_turn(times, clock):
    times.charge("heavy", 9.0)
    times.charge("light", 0.1)
    times.look(LATE)
    first, second = await asked(times, "heavy", "heavy")
    first.cancel()
    await asyncio.sleep(0)
    clock.now += 1.1 * AT_LEAST_EVERY_S
    times.look(LATE)
    assert await begun([second]) == [True]


def test_a_loop_that_stands_still_is_seen_to_be_behind():
    async def run() -> list[bool]:
        times = LoopTime()
        times.charge("heavy", 1.0)
        times.charge("light", 0.1)
        await times.turn("light")
        time.sleep(0.2)  # which is what keeps it from looking
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the look that comes too late
        return [task.done() for task in await asked(times, "heavy", "light")]

    assert asyncio.run(run()) == [False, True]


def test_what_a_coroutine_takes_of_the_thread_is_charged_and_not_what_it_waits():
    async def work() -> str:
        for _ in range(5):
            until = time.thread_time() + 0.01
            while time.thread_time() < until:
                pass
            await asyncio.sleep(0.04)
        return "done"

    async def run():
        times = LoopTime(Clock())
        return await times.charged("sender", work()), times._taken["sender"]

    result, taken = asyncio.run(run())
    assert result == "done" and 0.04 < taken < 0.15


def test_a_coroutine_that_is_charged_for_is_awaited_as_it_would_be():
    variable = contextvars.ContextVar("variable")
    seen = []

    async def work(name: str):
        variable.set(name)
        seen.append(asyncio.current_task())
        try:
            await asyncio.sleep(0 if name == "fails" else 10)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        raise ValueError(name)

    async def run():
        times = LoopTime()
        with pytest.raises(ValueError, match="fails"):
            await times.charged("sender", work("fails"))
        assert seen == [asyncio.current_task()] and variable.get() == "fails"
        task = asyncio.create_task(times.charged("sender", work("waits")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen[1:] == [task, "cancelled"]

    asyncio.run(run())
