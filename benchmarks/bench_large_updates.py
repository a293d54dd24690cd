"""Time to upload large updates, and latency of other clients in the meantime.

Run: `python benchmarks/bench_large_updates.py`. Two cases with the server of bench_hostile.py: one update in 208 bodies
of 3.3 MB, sent as fast as they are accepted; and 500 MB over a line of 10 Mbit/s, with time scaled by `--scale`: the
line is faster and `gap_timeout_s` shorter by this factor. Like the SDK, the client sends the first chunk after the
others have been accepted. Prints one JSON line per case: seconds until all were accepted, and until all had results;
outcomes of the requests; heartbeats of another client.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

import victim
from bench_hostile import BASE_MODEL, process, start
from common import emit
from plain_http import PROTOBUF, PlainClient, pass_body

KEY = "tml-large"
LENGTH = 8192
TOKEN_BYTES = 12
GAP_S, SLOW_BYTES_S = 300.0, 10e6 / 8


def update(client: PlainClient, model: str, bodies: int, body_bytes: float, bytes_s: float | None) -> dict:
    """Send the chunks of an update, and an optimizer step. Returns the figures."""
    rows = max(1, round(body_bytes / (LENGTH * TOKEN_BYTES)))
    tail = pass_body("", 0, rows, LENGTH)
    refused: Counter[int] = Counter()
    begun = time.perf_counter()
    ids, sent = [], 0
    for seq_id in [*range(2, bodies + 1), 1]:
        body = tail + pass_body(model, seq_id, 0, 0)
        sent += len(body)
        if bytes_s is not None:
            time.sleep(max(0.0, begun + sent / bytes_s - time.perf_counter()))
        while True:
            status, answer = client.request("POST", "/api/v1/forward_backward", body, Content_Type=PROTOBUF)
            if status != 429 or time.perf_counter() > begun + 120:
                break
            refused[status] += 1
            time.sleep(1)
        if status != 200:
            return {"sent_mb": round(sent / 1e6), "refused": f"{status} {answer[:200]!r}", "turned_away": refused[429]}
        ids.append(json.loads(answer)["request_id"])
    taken_s = time.perf_counter() - begun
    step = {"model_id": model, "seq_id": bodies + 1, "adam_params": {"learning_rate": 0.1}}
    ids.append(client.post("optim_step", step)["request_id"])
    results = [client.result(request_id) for request_id in ids]
    failures = [result for result in results if result.startswith(b'{"error"')]
    return {
        "sent_mb": round(sent / 1e6),
        "taken_s": round(taken_s, 1),
        "done_s": round(time.perf_counter() - begun, 1),
        "failed": len(failures),
        "first_failure": failures[0][:200].decode() if failures else "",
        "turned_away": refused[429],
    }


def measure(case: str, bodies: int, body_bytes: float, scale: float | None) -> None:
    """Run one case on a new server, with a concurrent victim."""
    with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as scratch:
        server = start(Path(scratch))
        if scale is not None:
            server.options["gap-timeout-s"] = str(GAP_S / scale)
        with server, process(victim.run, server.url, BASE_MODEL) as link:
            client = PlainClient(server.url, KEY)
            model = client.new_model(BASE_MODEL, client.new_session())
            link.send("begin")
            row = update(client, model, bodies, body_bytes, SLOW_BYTES_S * scale if scale is not None else None)
            link.send("end")
            pulse, training = link.recv()
            link.send("stop")
    p99 = round(1e3 * float(np.percentile(pulse.heartbeats_s, 99)), 1)
    emit(benchmark="large updates", case=case, **row, p99_ms=p99, steps_beside=training.steps)


def main(bodies: int, slow_mb: float, scale: float) -> None:
    measure(f"{bodies} bodies of 3.3 MB", bodies, 3.3e6, None)
    measure(f"{slow_mb:g} MB at 10 Mbit/s, times {scale:g}", max(2, round(slow_mb / 3.3)), 3.3e6, scale)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=208)
    parser.add_argument("--slow-mb", type=float, default=500)
    parser.add_argument("--scale", type=float, default=20, help="how many times as fast time goes in the slow case")
    arguments = parser.parse_args()
    main(arguments.bodies, arguments.slow_mb, arguments.scale)
