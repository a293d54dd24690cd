"""The table of futures: bounds, duplicates, waiting."""

import asyncio

from prometheus_client import CollectorRegistry

from skyrl.tinker.metrics import RequestMetrics
from skyrl.tinker.requests.futures import OVERHEAD_BYTES, Futures
from skyrl.tinker.results import Answer, Failure, Lost


def uncounted() -> RequestMetrics:
    return RequestMetrics(CollectorRegistry(), str)


def test_first_outcome_stays():
    futures = Futures(uncounted())
    futures.add("a", "t")
    futures.set("a", Answer(b"1"))
    futures.set("a", Failure("late", "server"))
    assert futures.get("a").outcome == Answer(b"1")


def test_oldest_answers_are_dropped_past_the_cap():
    futures = Futures(uncounted(), max_finished_bytes=3 * OVERHEAD_BYTES + 30)
    for name in "abcde":
        futures.add(name, "t")
        futures.set(name, Answer(b"0123456789"))
    assert [name for name in "abcde" if futures.get(name)] == ["c", "d", "e"]


def test_pending_futures_are_never_dropped():
    futures = Futures(uncounted(), max_finished_bytes=1)
    futures.add("pending", "t")
    for name in "ab":
        futures.add(name, "t")
        futures.set(name, Answer(b""))
    assert futures.get("pending") is not None


def test_dropped_sample_may_be_sent_again():
    futures = Futures(uncounted(), max_finished_bytes=1)
    for number in range(2):
        futures.add(f"sample-{number}", "t", ("s", number))
        futures.set(f"sample-{number}", Answer(b""))
    assert (futures.sample_with(("s", 0)), futures.sample_with(("s", 1))) == (None, "sample-1")


def test_lost_future_is_forgotten_and_whoever_waits_is_told():
    async def main():
        futures = Futures(uncounted())
        future = futures.add("sample-0", "t", ("s", 0))
        waiting = asyncio.create_task(future.wait(60))
        await asyncio.sleep(0)
        futures.set("sample-0", Lost())
        return await waiting, futures.get("sample-0")

    assert asyncio.run(main()) == (Lost(), None)


def test_everybody_who_waits_is_answered():
    async def main():
        futures = Futures(uncounted())
        future = futures.add("a", "t")
        waiting = [asyncio.create_task(future.wait(60)) for _ in range(3)]
        await asyncio.sleep(0)
        futures.set("a", Answer(b"1"))
        return await asyncio.gather(*waiting)

    assert asyncio.run(main()) == [Answer(b"1")] * 3


def test_wait_ends_without_an_outcome():
    assert asyncio.run(Futures(uncounted()).add("a", "t").wait(0)) is None


def test_closing_lets_go_of_all_who_wait_now_or_later():
    async def main():
        futures = Futures(uncounted())
        waiting = asyncio.create_task(futures.add("a", "t").wait(60))
        await asyncio.sleep(0)
        futures.close()
        return await waiting, await futures.add("b", "t").wait(60)

    assert asyncio.run(main()) == (None, None)


def test_large_answers_of_a_tenant_drop_only_its_own():
    futures = Futures(uncounted(), max_finished_bytes=10 * OVERHEAD_BYTES)
    for number in range(3):
        futures.add(f"small-{number}", "careful")
        futures.set(f"small-{number}", Answer(b"1"))
    for number in range(3):
        futures.add(f"large-{number}", "greedy")
        futures.set(f"large-{number}", Answer(bytes(8 * OVERHEAD_BYTES)))
    kept = [f"{size}-{number}" for size in ("small", "large") for number in range(3)]
    assert [name for name in kept if futures.get(name)] == ["small-0", "small-1", "small-2", "large-2"]


def test_a_large_answer_is_not_dropped_for_the_next_small_one_of_somebody_else():
    futures = Futures(uncounted(), max_finished_bytes=4 * OVERHEAD_BYTES)
    futures.add("large", "a")
    futures.set("large", Answer(bytes(4 * OVERHEAD_BYTES)))
    for number in range(2):
        futures.add(f"small-{number}", "b")
        futures.set(f"small-{number}", Answer(b"1"))
    assert futures.get("large") is not None


def test_single_answers_of_many_take_no_more_than_twice_the_cap_and_the_newest():
    futures, size = Futures(uncounted(), max_finished_bytes=10 * OVERHEAD_BYTES), 4 * OVERHEAD_BYTES
    for number in range(20):
        futures.add(f"a-{number}", f"t-{number}")
        futures.set(f"a-{number}", Answer(bytes(size - OVERHEAD_BYTES)))
    kept = [number for number in range(20) if futures.get(f"a-{number}")]
    assert kept == [15, 16, 17, 18, 19]
    futures.add("largest", "t")
    futures.set("largest", Answer(bytes(30 * OVERHEAD_BYTES)))
    assert futures.get("largest") is not None


def test_answers_to_many_sessions_of_one_sharer_count_together():
    futures = Futures(uncounted(), max_finished_bytes=10 * OVERHEAD_BYTES)
    futures.add("large", "honest session", sharer="10.0.0.1")
    futures.set("large", Answer(bytes(4 * OVERHEAD_BYTES)))
    for number in range(20):
        futures.add(f"a-{number}", f"session-{number}", sharer="10.0.0.2")
        futures.set(f"a-{number}", Answer(bytes(OVERHEAD_BYTES)))
    futures.add("next", "honest session", sharer="10.0.0.1")
    futures.set("next", Answer(b""))
    assert futures.get("large") is not None
