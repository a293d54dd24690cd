"""Harm that one client can do to another: heartbeats and training of a client while others attack the server.

Run: `python benchmarks/bench_hostile.py --seconds 10 --together 60`. A real server whose passes sleep, as on a separate
device (benchmarks/slow_device.py), so the training rate shows the loss on the way to the device. Each attack runs
alone, then all together. Attackers are niced processes on the same cores; `attackers_share` is their own share of the
processor. The time of a heartbeat counts from its due time. Prints one JSON line per attack. Exits with 1 unless each
attack meets the goals: p99 of heartbeats, training rate relative to the undisturbed rate, memory growth of the API
process, and no failed request of the victim.
"""

import argparse
import json
import multiprocessing
import os
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil

import attacks
import victim
from attacks import ATTACKS, LISTING_KEY, SMALL, Size
from common import emit
from plain_http import PlainClient

BASE_MODEL = "fake"
PASS_S = 0.05
"""Seconds of a small model's pass; 128 x 1,024 tokens with 0.6B parameters take one second at 400 TFLOP/s."""
P99_MS, RATE, GROWTH_MIB = 250.0, 0.4, 3072.0
"""Goals. Memory: 2 GiB of queued requests, 256 MiB of answers, and data being read and created at a time."""
TOGETHER = "all together"


def keys() -> list[str]:
    """Keys of all clients; each is a tenant."""
    attackers = [f"tml-attacker-{name}{part}" for name in ATTACKS for part in ("", "-a", "-b")]
    return ["tml-victim", "tml-large", LISTING_KEY, *attackers]


def start(folder: Path, pass_s: float = PASS_S):
    """Create the server under attack, whose passes take this many seconds."""
    from skyrl.tinker.local_server import LocalServer

    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    config = json.dumps({"max_context_length": 2**19, "rows": 64, "pass_s": pass_s})
    options = {"backend": "benchmarks.slow_device:SlowDevice", "backend-config": config}
    return LocalServer(folder, BASE_MODEL, options, {"PYTHONPATH": path, "SKYRL_API_KEYS": ",".join(keys())})


def fill(server, size: Size) -> None:
    """Fill the database as after long use: done requests, and one key's many sessions and checkpoints, all copies."""
    client = PlainClient(server.url, LISTING_KEY)
    session = client.new_session()
    model = client.new_model(BASE_MODEL, session)
    client.result(client.post("save_weights", {"model_id": model, "path": "saved", "seq_id": 1})["request_id"])
    with closing(sqlite3.connect(server.folder / "server.db", timeout=60)) as database:
        tables = [
            (
                "requests",
                "kind = 'save_weights'",
                {"request_id": "'copy-' || n", "seq_id": "1000 + n"},
                size.table_rows,
            ),
            ("sessions", "1", {"session_id": "session_id || '-' || n"}, size.listed),
            ("checkpoints", "1", {"id": "1000 + n", "name": "name || '-' || n"}, size.listed),
        ]
        for table, where, changed, copies in tables:
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            values = ", ".join(changed.get(name, name) for name in columns)
            numbers = f"WITH RECURSIVE many(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM many WHERE n < {copies})"
            one = f"(SELECT * FROM {table} WHERE {where} LIMIT 1)"
            database.execute(f"INSERT INTO {table} {numbers} SELECT {values} FROM {one}, many")
        database.commit()


@dataclass
class Memory:
    """Resident MiB of the API process, measured ten times per second in a thread."""

    pid: int
    mib: list[float] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Memory":
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        process = psutil.Process(self.pid)
        with suppress(psutil.NoSuchProcess):  # it was killed; its successor has another pid
            self.mib.append(process.memory_info().rss / 2**20)
            while not self._over.wait(0.1):
                self.mib.append(process.memory_info().rss / 2**20)


@contextmanager
def process(target, *arguments) -> Iterator[Connection]:
    """Run a process. Waits until it has reported that it is ready."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    child = context.Process(target=target, args=(*arguments, its), daemon=True)
    child.start()
    its.close()
    try:
        assert ours.recv() == "ready"
        yield ours
    finally:
        child.kill()
        child.join()


def measure(server, size: Size, names: list[str], seconds: float, link: Connection) -> tuple[dict, dict]:
    """(figures of a case, reports of the attackers) during the named attacks."""
    api = server.pids().api
    with ExitStack() as stack:
        attackers = [stack.enter_context(process(attacks.run, name, server.url, BASE_MODEL, size)) for name in names]
        with Memory(api) as memory:
            begun = time.monotonic()
            link.send("begin")
            for attacker in attackers:
                attacker.send("begin")
            time.sleep(seconds)
            wall_s = time.monotonic() - begun
            link.send("end")
            for attacker in attackers:
                attacker.send("end")
            pulse, training = link.recv()
            reports = [attacker.recv() for attacker in attackers]
    row = figures(pulse, training, reports, memory.mib, wall_s, survived=server.pids().api == api)
    return row, dict(zip(names, reports, strict=True))


def figures(
    pulse: victim.Part, training: victim.Part, reports: list[dict], mib: list[float], wall_s: float, survived: bool
) -> dict[str, object]:
    """Return the printed figures of a case.

    Args:
        pulse: Heartbeats of the victim.
        training: Training of the victim.
        reports: Reports of the attackers.
        mib: Resident memory of the API process, the first value before the attack.
        wall_s: Duration in seconds.
        survived: True if the API process is still the same.
    """
    statuses = pulse.statuses + training.statuses
    times = 1e3 * np.asarray(pulse.heartbeats_s or [wall_s])  # none: they took at least this long
    attackers_s = sum(report["processor_s"] for report in reports)
    counted = sum((Counter(report["statuses"]) for report in reports), Counter[str]())
    return {
        "heartbeats": len(pulse.heartbeats_s),
        **{f"p{q}_ms": round(float(np.percentile(times, q)), 1) for q in (50, 99, 100)},
        "steps_per_s": round(training.steps / wall_s, 2),
        "peak_mib": round(max(mib)),
        "growth_mib": round(max(mib) - mib[0]),
        "victim_429": statuses[429],
        "victim_4xx": sum(number for status, number in statuses.items() if 400 <= status < 500 and status != 429),
        "victim_5xx": sum(number for status, number in statuses.items() if status >= 500),
        "broken": pulse.broken + training.broken,
        "failed": len(pulse.failed) + len(training.failed) + (not survived),
        "attacks_per_s": round(sum(report["requests"] for report in reports) / wall_s, 1),
        "attackers_got": " ".join(f"{status}:{number}" for status, number in sorted(counted.items())),
        "attackers_share": round(attackers_s / (wall_s * (os.cpu_count() or 1)), 3),
        "largest_answer": max((report["largest_answer"] for report in reports), default=0),
        "first_failure": (pulse.failed + training.failed + [""])[0][:200],
    }


def missed(row: dict) -> list[str]:
    """Goals that a case misses."""
    kept = {
        "heartbeat": row["p99_ms"] < P99_MS,
        "rate": row["of_alone"] > RATE,
        "memory": row["growth_mib"] < GROWTH_MIB,
        "requests": row["failed"] == 0,
    }
    return [goal for goal, is_kept in kept.items() if not is_kept]


def rows(
    names: list[str], seconds: float, together: float, size: Size, folder: Path, pass_s: float = PASS_S
) -> Iterator[dict]:
    """Figures of each attack. Each attack has a new server, without leftovers of the previous one."""
    cases = [(name, [name], seconds) for name in names]
    if together:
        cases.append((TOGETHER, list(ATTACKS), together))
    for number, (case, attackers, duration) in enumerate(cases):
        server = start(folder / str(number), pass_s)
        with server:
            fill(server, size)
            with process(victim.run, server.url, BASE_MODEL) as link:
                alone, _ = measure(server, size, [], min(duration, 5.0), link)
                row, _ = measure(server, size, attackers, duration, link)
                link.send("stop")
        row["alone_steps_per_s"] = alone["steps_per_s"]
        row["alone_p99_ms"] = alone["p99_ms"]
        row["of_alone"] = round(row["steps_per_s"] / alone["steps_per_s"], 2)
        row["missed"] = " ".join(missed(row))
        yield {"case": case, "seconds": duration, "pass_s": pass_s, **row}


def main(names: list[str], seconds: float, together: float, size: Size, pass_s: float) -> bool:
    """Run the attacks and print their figures. Return True if all goals were met."""
    kept = True
    with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as scratch:
        for row in rows(names, seconds, together, size, Path(scratch), pass_s):
            kept &= not row["missed"]
            emit(benchmark="hostile tenants", **row)
    return kept


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="of each attack alone")
    parser.add_argument("--together", type=float, default=60, help="of all attacks at once; 0: leave it out")
    parser.add_argument("--only", nargs="+", choices=sorted(ATTACKS), default=list(ATTACKS), metavar="NAME")
    parser.add_argument("--pass-s", type=float, default=PASS_S, help="seconds of a pass on the device")
    parser.add_argument("--small", action="store_true", help="tiny sizes: shows that it works, and measures nothing")
    arguments = parser.parse_args()
    size = SMALL if arguments.small else Size()
    sys.exit(0 if main(arguments.only, arguments.seconds, arguments.together, size, arguments.pass_s) else 1)
