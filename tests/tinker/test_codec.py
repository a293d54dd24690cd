"""Order in which bodies are read. Work is held by events, so that what is counted is its order."""

import asyncio
import threading

import pytest

from skyrl.tinker.wire.sharing import LARGE_BYTES, THREADS_FOR_BODIES, DecodePool, encoded

LARGE = LARGE_BYTES + 1


class Work:
    """Something to do that says so and, if it is held, ends when it is let go."""

    def __init__(self, begun: list[str], name: str, held: bool = False):
        self._begun, self._name = begun, name
        self.go = threading.Event()
        if not held:
            self.go.set()

    def __call__(self) -> str:
        self._begun.append(self._name)
        self.go.wait()
        return self._name


async def flooded(pool: DecodePool, begun: list[str], number: int = 20) -> tuple[list[Work], list[asyncio.Task[str]]]:
    """A flood of a, the first of which fill all threads. Returns those, and all tasks."""
    works = [Work(begun, "a", held=index < THREADS_FOR_BODIES) for index in range(number)]
    tasks = [asyncio.ensure_future(pool.run("a", LARGE, work)) for work in works]
    while len(begun) < THREADS_FOR_BODIES:
        await asyncio.sleep(0)
    return works[:THREADS_FOR_BODIES], tasks


def let_go(works: list[Work]) -> None:
    for work in works:
        work.go.set()


def test_a_flood_of_one_tenant_does_not_delay_the_body_of_another():
    async def run() -> list[str]:
        pool, begun = DecodePool(), []
        held, tasks = await flooded(pool, begun)
        other = asyncio.ensure_future(pool.run("b", LARGE, Work(begun, "b")))
        await asyncio.sleep(0)
        let_go(held)
        await asyncio.gather(other, *tasks)
        return begun

    begun = asyncio.run(run())
    assert begun.index("b") == THREADS_FOR_BODIES and begun.count("a") == 20


def test_tenants_are_given_the_same_number_of_bytes():
    async def run() -> list[str]:
        pool, begun = DecodePool(), []
        held, tasks = await flooded(pool, begun)
        for name, size in [("b", LARGE), ("c", 4 * LARGE)]:
            tasks += [asyncio.ensure_future(pool.run(name, size, Work(begun, name))) for _ in range(20)]
        await asyncio.sleep(0)
        let_go(held)
        await asyncio.gather(*tasks)
        return begun

    begun = asyncio.run(run())
    while_all_wait = begun[: len(begun) - begun[::-1].index("b")]
    assert while_all_wait.count("b") == 20 and 5 <= while_all_wait.count("c") <= 6


def test_a_result_does_not_wait_for_bodies():
    async def run() -> None:
        held, tasks = await flooded(DecodePool(), [])
        assert await encoded(LARGE, lambda: "result") == "result"
        let_go(held)
        await asyncio.gather(*tasks)

    asyncio.run(run())


@pytest.mark.parametrize("begun_already", [True, False])
def test_who_leaves_gives_its_place_to_the_next(begun_already):
    async def run() -> list[str]:
        pool, begun = DecodePool(), []
        held, tasks = await flooded(pool, begun, 10)
        for task in tasks[:2] if begun_already else tasks[2:9]:
            task.cancel()
        await asyncio.sleep(0)
        let_go(held)
        return [str(result) for result in await asyncio.gather(*tasks, return_exceptions=True)]

    results = asyncio.run(run())
    assert results.count("a") == (8 if begun_already else 3) and results[-1] == "a"


def test_what_fails_lets_the_next_one_go():
    async def run() -> str:
        pool = DecodePool()
        with pytest.raises(ZeroDivisionError):
            await asyncio.gather(*(pool.run("a", LARGE, lambda: 1 // 0) for _ in range(3)))
        return await pool.run("a", LARGE, lambda: "done")

    assert asyncio.run(run()) == "done"


@pytest.mark.parametrize(
    ("size", "at_most", "in_a_thread"), [(LARGE - 1, 0, False), (LARGE, 0, True), (1, LARGE, True)]
)
def test_few_bytes_are_worked_on_at_once_unless_they_may_become_many(size, at_most, in_a_thread):
    async def run() -> bool:
        return await DecodePool().run("a", size, threading.current_thread, at_most) is not threading.current_thread()

    assert asyncio.run(run()) == in_a_thread


def test_the_pieces_of_one_take_turns_with_the_work_of_others():
    async def run() -> list[str]:
        pool, begun = DecodePool(), []
        held, tasks = await flooded(pool, begun, THREADS_FOR_BODIES)

        async def read() -> list[str]:
            made = (Work(begun, f"piece {number}")() for number in range(5))
            return [piece async for piece in pool.pieces("b", LARGE, made)]

        reader = asyncio.ensure_future(read())
        tasks += [asyncio.ensure_future(pool.run("c", 2 * LARGE, Work(begun, "c"))) for _ in range(2)]
        await asyncio.sleep(0)
        let_go(held)
        assert await reader == [f"piece {number}" for number in range(5)]
        await asyncio.gather(*tasks)
        return begun

    begun = asyncio.run(run())
    assert begun.index("c") < begun.index("piece 3")


def test_a_thread_that_is_left_behind_is_not_given_to_the_next_before_it_has_ended():
    async def run() -> None:
        pool, begun = DecodePool(), []
        held, tasks = await flooded(pool, begun, THREADS_FOR_BODIES)
        for task in tasks:
            task.cancel()
        other = asyncio.ensure_future(pool.run("b", LARGE, Work(begun, "b")))
        await asyncio.sleep(0.01)
        waits = "b" in pool._lines
        let_go(held)
        assert await other == "b"
        assert waits

    asyncio.run(run())
