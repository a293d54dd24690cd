"""Cost of request timelines in the API process: CPU time per request, memory, and CPU time of an export.

Run: `python benchmarks/bench_traces.py`. Futures of samples of 100 sessions, each from acceptance to outcome, with and
without their timelines. Prints one JSON line per case: microseconds and milliseconds of the process's CPU time, median
and 90th percentile.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
from prometheus_client import CollectorRegistry

from common import emit
from skyrl.tinker.metrics import RequestMetrics
from skyrl.tinker.requests.futures import Futures
from skyrl.tinker.results import Answer
from skyrl.tinker.traces import MAX_REQUESTS, Timeline, Timelines, text

REQUESTS = 1000
SESSIONS = [f"00000000-0000-0000-0000-{number:012}" for number in range(100)]
ANSWER = Answer(b"")


def names(first: int, count: int) -> list[tuple[str, tuple[str, int]]]:
    keys = [(f"{SESSIONS[number % len(SESSIONS)]}:sample:0", number) for number in range(first, first + count)]
    return [(f"sample-{sampler}-{number}", (sampler, number)) for sampler, number in keys]


def futures_alone(futures: Futures, some: list[tuple[str, tuple[str, int]]]) -> None:
    for request_id, key in some:
        futures.add(request_id, "tenant", key)
        futures.begin((request_id,))
        futures.set(request_id, ANSWER)


def notes_alone(timelines: Timelines, some: list[tuple[str, tuple[str, int]]]) -> None:
    """Do the work of timelines, without the futures that usually do it."""
    for request_id, (sampler, _) in some:
        timeline = Timeline(request_id, sampler)
        timeline.sent = time.monotonic()
        timeline.began = time.monotonic()
        timeline.done = time.monotonic()
        timelines.end(timeline, ANSWER)


def measured(call: Callable[[int], object], repeats: int) -> tuple[float, float]:
    """Median and 90th percentile of the milliseconds of a call, which gets its number as the argument."""
    times = []
    for number in range(repeats + 2):
        start = time.thread_time()
        call(number)
        times.append(1e3 * (time.thread_time() - start))
    p50, p90 = np.percentile(times[2:], (50, 90))
    return round(float(p50), 2), round(float(p90), 2)


def main(repeats: int) -> None:
    futures, timelines = Futures(RequestMetrics(CollectorRegistry(), str)), Timelines()
    rounds = [names(REQUESTS * number, REQUESTS) for number in range(repeats + 2)]
    for case, call in {
        "a future with its timeline": lambda number: futures_alone(futures, rounds[number]),
        "its timeline alone": lambda number: notes_alone(timelines, rounds[number]),
    }.items():
        p50, p90 = measured(call, repeats)
        emit(
            benchmark="traces", case=case, p50_us=round(1e3 * p50 / REQUESTS, 2), p90_us=round(1e3 * p90 / REQUESTS, 2)
        )
    tracemalloc.start()
    full = Timelines()
    notes_alone(full, names(0, MAX_REQUESTS))
    kept = [one for session in SESSIONS for one in full.of_session(session)]
    mib = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    emit(benchmark="traces", case="memory", requests=len(kept), mib=round(mib, 1))
    some = kept[:10_000]
    p50, p90 = measured(lambda _: b"".join(text("session", some)), repeats=5)
    size = len(b"".join(text("session", some))) / 2**20
    emit(benchmark="traces", case="export of 10000 requests", p50_ms=p50, p90_ms=p90, mib=round(size, 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    main(parser.parse_args().repeats)
