"""Latency and memory of the server while thousands of requests wait.

Run: `python benchmarks/bench_load.py`. Client processes of the stock SDK keep 2,000 samples waiting and 16 models
training on the built-in model, while another process makes cheap calls over plain HTTP. Prints one JSON line per cheap
call (milliseconds), one for the work done, and one per server process (resident memory at middle and end).
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np

from common import emit
from load import Load, Report, put_load


def main(load: Load) -> None:
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    from skyrl.tinker.local_server import LocalServer

    with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as scratch, LocalServer(Path(scratch)) as server:
        assert server.process is not None
        report = put_load(server.url, server.process.pid, "tiny-qwen3", load)
    for name, times in report.latencies_s.items():
        quantiles = {f"p{q}_ms": round(1e3 * float(np.percentile(times, q)), 1) for q in (50, 90, 99, 100)}
        emit(benchmark="load, cheap calls", case=name, calls=len(times), **quantiles)
    seconds = load.warm_up_s + load.seconds
    emit(
        benchmark="load, work",
        case=f"{load.samples} samples, {load.trainers} training clients",
        samples=report.samples,
        tokens_per_s=round(report.samples * load.max_tokens / seconds),
        steps=report.steps,
        errors=len(report.errors),
    )
    emit_memory(report)
    for error in report.errors[:10]:
        print(error)


def emit_memory(report: Report) -> None:
    """Print medians around the middle and over the last tenth of the time."""
    for name, mib in report.memory_mib.items():
        tenth = max(1, len(mib) // 10)
        middle = statistics.median(mib[len(mib) // 2 :][:tenth])
        end = statistics.median(mib[-tenth:])
        growth = round(end - middle, 1)
        emit(benchmark="load, memory", case=name, middle_mib=round(middle), end_mib=round(end), growth_mib=growth)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--trainers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=120)
    arguments = parser.parse_args()
    main(Load(arguments.samples, arguments.trainers, arguments.seconds))
