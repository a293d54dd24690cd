"""Cost of metrics in the API process: a scrape, and the accounting of one sample with its HTTP requests.

Run: `python benchmarks/bench_metrics.py`. The registry has its maximum size: 50 tenants, 40 routes, 12 operations.
Prints one JSON line per case: milliseconds of the process's CPU time, median and 90th percentile.
"""

import argparse
import time
from dataclasses import dataclass

import numpy as np

from common import emit
from skyrl.backends.statistics import STATISTICS
from skyrl.tinker.identity.callers import DisplayNames
from skyrl.tinker.metrics import MOST_TENANTS, ServerMetrics
from skyrl.tinker.results import Answer

TENANTS = [f"key-{number:016x}" for number in range(MOST_TENANTS)]
ROUTES = [f"/api/v1/route_{number}" for number in range(40)]
OPERATIONS = [f"operation_{number}" for number in range(12)]


@dataclass(frozen=True)
class Ready:
    """An engine that reports as many statistics as with the JAX backend."""

    metrics: dict[str, int]
    statistics: dict[str, int]
    state: str = "ready"
    pid: int | None = None


READY = Ready({"training_programs": 1, "sampling_programs": 1}, dict.fromkeys(STATISTICS, 1))


def one_request(metrics: ServerMetrics, tenant: str, route: str, operation: str) -> None:
    requests = metrics.requests
    requests.added(tenant)
    requests.began(tenant, 0.1)
    requests.tokens(tenant, "prompt", 100)
    requests.tokens(tenant, "sampled", 100)
    requests.left(tenant, ran=True)
    requests.ended(f"{operation}-1", Answer(b""), 0.2)
    for _ in range(2):
        metrics.http.answered("POST", route, 200, 0.01)


def main(repeats: int) -> None:
    metrics = ServerMetrics(DisplayNames({tenant: tenant for tenant in TENANTS}), lambda: READY)
    for tenant in TENANTS:
        one_request(metrics, tenant, ROUTES[0], OPERATIONS[0])
    for route in ROUTES:
        one_request(metrics, TENANTS[0], route, OPERATIONS[0])
    for operation in OPERATIONS:
        one_request(metrics, TENANTS[0], ROUTES[0], operation)
    cases = {
        "scrape": lambda: metrics.text(""),
        "1000 requests": lambda: [
            one_request(metrics, TENANTS[n % MOST_TENANTS], ROUTES[0], "sample") for n in range(1000)
        ],
    }
    for case, call in cases.items():
        call()
        times = []
        for _ in range(repeats if case == "scrape" else 20):
            start = time.thread_time()
            call()
            times.append(1e3 * (time.thread_time() - start))
        p50, p90 = np.percentile(times, (50, 90))
        emit(benchmark="metrics", case=case, p50_ms=round(float(p50), 2), p90_ms=round(float(p90), 2))
    emit(benchmark="metrics", case="size of a scrape", lines=metrics.text("")[0].count(b"\n"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    main(parser.parse_args().repeats)
