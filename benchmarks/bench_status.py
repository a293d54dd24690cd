"""Duration of `GET /status` with thousands of waiting requests, and the delay that it causes for others.

Run: `python benchmarks/bench_status.py`. A server with the fake backend of the tests, whose engine is stopped. Samples
of one model wait, and 200 training requests of ten models. Prints one JSON line per route: median and 90th percentile
of milliseconds until it was answered, and until a concurrent `GET /livez` on another connection was.
"""

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np

from common import emit

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the fake backend of the tests
from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready

TRAINING = 200


def fill(server: LiveServer, samples: int) -> None:
    models = [server.model() for _ in range(10)]
    sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
    server.engine.hold()
    for number in range(TRAINING):
        server.submit_pass(models[number % 10], number // 10 + 1)
    for number in range(samples):
        server.submit_sample(sampler, number)


def timed(http: httpx.Client, url: str) -> float:
    start = time.perf_counter()
    assert http.get(url).status_code == 200
    return 1e3 * (time.perf_counter() - start)


def main(samples: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder, LiveServer(Path(folder)) as server, httpx.Client() as other:
        wait_until_ready(server)
        fill(server, samples)
        for path in ("/livez", "/status", "/operator/requests?limit=100"):
            own, beside = [], []
            for _ in range(repeats):
                look = threading.Thread(target=lambda: own.append(timed(server.http, server.url + path)))  # noqa: B023
                look.start()
                beside.append(timed(other, f"{server.url}/livez"))
                look.join()
            numbers = {"answer": own, "livez_beside": beside}
            found = {
                f"{name}_p{part}_ms": round(float(np.percentile(values[repeats // 10 :], part)), 2)
                for name, values in numbers.items()
                for part in (50, 90)
            }
            emit(benchmark="status", route=path, waiting=samples + TRAINING, **found)
        server.engine.let_go()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    main(options.samples, options.repeats)
