"""Order in which waiting samples begin, and which of them may pass others, without a model."""

import pytest
from sampling_rig import request

from skyrl.backends.common.sampling.sequences import Job
from skyrl.backends.common.sampling.waiting_queue import LOOK_PAST, WaitingQueue, pages_in_all, pages_to_begin

ROOM = 20


def job(pages: int, samples: int = 1) -> Job:
    """Of a prompt of one token, whose samples take so many pages each."""
    return Job.of(request([1], max_tokens=64 * pages, n=samples), frozenset())


def queue_of(*jobs: Job) -> WaitingQueue:
    line = WaitingQueue(ROOM)
    for one in jobs:
        line.append(one)
    return line


def let_begin(line: WaitingQueue, free: int, begun: tuple[Job, ...] = ()) -> list[Job]:
    """Those that begin while so many pages are free."""
    started = []
    for one in line.may_begin(begun):
        one.lacks_room = pages_to_begin(one) > free
        if not one.lacks_room:
            one.slot, free = 1, free - pages_to_begin(one)
            line.begin(one)
            started.append(one)
    return started


def test_all_begin_in_the_order_of_arrival_while_there_is_room():
    jobs = [job(3), job(1), job(9)]
    line = queue_of(*jobs)
    assert let_begin(line, free=13) == jobs
    assert len(line) == 0


def test_a_small_one_passes_a_large_one_that_lacks_room():
    large, small = job(9), job(2)
    line = queue_of(large, small)
    assert let_begin(line, free=4) == [small]
    assert list(line) == [large]


def test_a_large_one_is_passed_by_as_many_pages_as_the_cache_has_and_no_more():
    large, small = job(9), [job(3) for _ in range(30)]
    line = queue_of(large, *small)
    passed = [one for _ in range(30) for one in let_begin(line, free=3)]
    assert passed == small[: ROOM // 3]
    assert let_begin(line, free=9) == [large]
    assert let_begin(line, free=9) == small[6:9]


def test_samples_count_one_by_one_as_what_passes():
    large, many, small = job(9), job(3, samples=7), job(1)
    line = queue_of(large, many, small)
    assert pages_in_all(many) == 21
    assert let_begin(line, free=8) == [small]


def test_one_that_lacks_its_version_alone_is_passed_without_limit():
    loading, small = job(9), [job(3) for _ in range(30)]
    line = queue_of(loading, *small)
    for one in line.may_begin():
        if one is not loading:
            one.slot = 1
            line.begin(one)
    assert list(line) == [loading]
    assert loading.passed_by == 0


@pytest.mark.parametrize("passed", [0, ROOM])
def test_one_that_lacks_room_for_its_next_sample_is_passed_within_the_same_limit(passed):
    begun, small = job(9, samples=2), job(3)
    begun.lacks_room, begun.passed_by = True, passed
    assert let_begin(queue_of(small), free=3, begun=(begun,)) == ([] if passed else [small])
    assert begun.passed_by == (passed or 3)


def test_no_more_are_looked_at_than_the_first_of_a_long_line():
    line = queue_of(*(job(9) for _ in range(LOOK_PAST + 10)))
    looked = 0
    for one in line.may_begin():
        one.lacks_room = True
        looked += 1
    assert looked == LOOK_PAST
